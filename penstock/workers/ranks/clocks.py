"""How far apart the clocks of ranks on several machines are, as their messages show."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from time import monotonic_ns

_KEPT = 64  # of the latest messages: clocks drift


@cache
def machine() -> str:
    """Names this machine since it was started: processes with the same name share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class ClockOffset:
    """By how much one clock is ahead of another one, seen by the messages of its owner.

    A message seems to take as long as it does, and longer by what the receiver's clock is ahead of
    the sender's. So the least of many is nearest to that.
    """

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=_KEPT)

    def note(self, sent: int, received: int) -> None:
        """A message was sent then, by the sender's clock, and received then by the receiver's."""
        self._seen.append(received - sent)

    @property
    def least(self) -> int | None:
        """Nanoseconds that a message seemed to take at least; `None` before the first."""
        return min(self._seen, default=None)


class Clock:
    """This rank's clock beside that of rank 0 (Cristian 1989, doi:10.1007/BF01784024).

    Messages to rank 0 and back are assumed to take equally long at least.

    Attributes:
        ahead: nanoseconds by which rank 0's clock is ahead of this one; 0 on the same machine.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self._back = ClockOffset()

    def note(self, machine_of_0: str, there: int | None, sent: int) -> None:
        """Rank 0 has answered.

        Args:
            machine_of_0: on which it is, see `machine`.
            there: nanoseconds that messages of this rank seemed to take at least.
            sent: when it has sent this, by its clock.
        """
        self._back.note(sent, monotonic_ns())
        back = self._back.least
        if machine_of_0 and machine_of_0 == machine():
            self.ahead = 0
        elif there is not None and back is not None:
            self.ahead = (there - back) // 2
