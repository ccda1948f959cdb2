"""Turns of replicas that are processes: every one notes in shared memory how far it is.

For each `SharedTurns` there is one integer a replica: the first of its own numbers that is not
done. So a number's turn has come when those of all other replicas are not below it. Whoever gets
further wakes them: it writes a byte to a pipe of each of the others, who read it when they wait.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine.turns import Turns
from penstock.errors import PenstockError

INTEGER = 8
"""Bytes of an integer in this memory."""


class Wakeups(NamedTuple):
    """File descriptors of pipes, none of which blocks.

    Attributes:
        own: can be read when another replica has got further.
        others: of those replicas.
    """

    own: int
    others: Sequence[int]

    def wake(self) -> None:
        """Let the others look how far everybody is."""
        for other in self.others:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is awake; it is gone
                os.write(other, b"\0")

    def close(self) -> None:
        """Let go of the pipes."""
        for fd in (self.own, *self.others):
            os.close(fd)

    def clear(self) -> None:
        """Clear the own wakeup, before looking."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.own, 1 << 16)


class SharedTurns:
    """Turns of which each replica has a part in its process.

    Args:
        reached: for every replica the first of its numbers that is not done.
        replica: which of them is here.
        wakeups: wake the others, and are waited for here.
        sleep: waits for the own wakeup; raises `Aborted` if the pass is given up.
    """

    def __init__(
        self, reached: memoryview, replica: int, wakeups: Wakeups, sleep: Callable[[], None]
    ) -> None:
        self._reached = reached
        self._replica = replica
        self._wakeups = wakeups
        self._sleep = sleep
        self._left: deque[int] = deque()
        self._end = 0

    def begin(self, numbers: Sequence[int], end: int) -> None:
        """This replica begins a pass."""
        self._left, self._end = deque(numbers), end
        self._note()

    def has_come(self, number: int) -> bool:
        """Whether all before this number are done."""
        reached, own = self._reached, self._replica
        return all(reached[other] >= number for other in range(len(reached)) if other != own)

    def wait(self, number: int) -> None:
        """Wait until all before this number are done."""
        while not self.has_come(number):
            self._sleep()
            self._wakeups.clear()

    def done(self, number: int) -> None:
        """This number has had its turn, or does not need it."""
        if self._left and self._left[0] == number:
            self._left.popleft()
            self._note()

    def _note(self) -> None:
        self._reached[self._replica] = self._left[0] if self._left else self._end
        self._wakeups.wake()


class Turnstile:
    """Makes the turns of one replica, from memory that all of them have.

    Args:
        replica: which it is.
        of: how many there are.
        wakeups: see `SharedTurns`.
        sleep: see `SharedTurns`.
    """

    def __init__(self, replica: int, of: int, wakeups: Wakeups, sleep: Callable[[], None]) -> None:
        self._replica, self._of = replica, of
        self._wakeups, self._sleep = wakeups, sleep
        self._free: deque[memoryview] = deque()

    def extend(self, memory: memoryview) -> None:
        """Have memory for more turns.

        Args:
            memory: integers, zero at first; the same in all replicas.
        """
        self._free += [memory[k : k + self._of] for k in range(0, len(memory), self._of)]

    def make(self, first: int) -> Turns:
        """The next turns; `first` is not needed, as each replica notes where it begins."""
        if not self._free:
            raise PenstockError("there is no shared memory left for turns")
        return SharedTurns(self._free.popleft(), self._replica, self._wakeups, self._sleep)
