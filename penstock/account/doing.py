"""What a thread of the script has done since the last step, as named intervals of time."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from penstock.account.record import PASS, Interval, shortened

_MANY = 256  # intervals, from which on they are put together


class Doing:
    """What one thread does: things that have names, one within another."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []  # what it does now, and since when
        self._done: list[Interval] = []
        self._since = 0
        self._most = _MANY

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing that has a name, and has done nothing."""
        return not self._open and not self._done

    def is_within(self, what: str) -> bool:
        """Whether something of this name has begun, and is not over."""
        return any(name == what for name, _ in self._open)

    def enter(self, what: str) -> None:
        """Note that something begins now; `what` is its name, as attribution has it."""
        self._open.append((what, monotonic_ns()))

    def exit(self, what: str) -> None:
        """Note that the latest thing of this name has ended, with everything begun within it.

        Does nothing if nothing of this name has begun, as when a Ctrl-C came before `enter`.
        """
        for place in reversed(range(len(self._open))):
            if self._open[place][0] == what:
                self._done.append(Interval(*self._open[place], monotonic_ns()))
                del self._open[place:]
                return

    def forget(self, what: str) -> None:
        """Drop what has begun under this name and will not end, as after an error."""
        self._open = [doing for doing in self._open if doing[0] != what]

    def note(self, interval: Interval) -> None:
        """Add something that has ended already."""
        self._done.append(interval)

    def until(self, now: int) -> list[Interval]:
        """All intervals since `clear`; those that have not ended yet are cut at `now`."""
        return [*self._done, *(Interval(*doing, now) for doing in self._open)]

    def shorten(self, passes: Sequence[Interval]) -> None:
        """Merge intervals of the same name if there are many; their total times stay the same.

        Args:
            passes: the passes that were run meanwhile, which are not merged across.
        """
        if len(self._done) < self._most:
            return
        now = monotonic_ns()
        every = [*self.until(now), *passes]
        begin = max(self._since, min(interval.begin for interval in every))
        self._done = [i for i in shortened(every, begin, now) if i.what != PASS]
        self._open = [(what, now) for what, _ in self._open]
        self._most = max(_MANY, 2 * len(self._done))

    def clear(self, now: int) -> None:
        """Forget what it has done until now; what it does goes on."""
        self._done, self._since, self._most = [], now, _MANY
