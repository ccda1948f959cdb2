"""What was done since workers had last had copies of what only they have.

Workers that share no memory with the script keep copies of their weights, buffers, gradients and
optimizer state with each other. A copy is of one moment, between two works (a pass, a step of an
optimizer, clipping), and is sent while work goes on. So when a worker dies, all go back to the last
moment of which every copy has arrived, and do once more what was done since then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_MANY = 16  # works that are kept, with their batches


class _Work(NamedTuple):
    """Something that was done.

    Attributes:
        copy: the number of the last copy that was made before it.
        run: does it once more.
    """

    copy: int
    run: Callable[[], object]


class Copies:
    """How far copies are, and what was done since, oldest first.

    Attributes:
        made: the number of the latest copy; 0 if there is none, when the script has everything.
        safe: the number of the latest one that outlives any worker.
    """

    def __init__(self) -> None:
        self.made = 0
        self.safe = 0
        self._works: list[_Work] = []
        self._own: _Work | None = None  # what the script itself did right before the latest

    def note(self, run: Callable[[], object], copy: int) -> None:
        """Something was done.

        Args:
            run: does it once more, with the workers that there are then.
            copy: the number of the last copy that was made before it.
        """
        self._works.append(_Work(copy, run))

    def since(self) -> list[Callable[[], object]]:
        """What was done since the copy that is safe."""
        return [work.run for work in self._works if work.copy >= self.safe]

    @property
    def is_behind(self) -> bool:
        """Whether something was done since the latest copy was made."""
        return any(work.copy >= self.made for work in self._works)

    @property
    def is_far_behind(self) -> bool:
        """Whether so much was done since then that another copy takes less."""
        return sum(work.copy >= self.made for work in self._works) >= _MANY

    def make(self, own: Callable[[], object] | None = None) -> int:
        """Another copy is about to be made; returns its number.

        Args:
            own: does once more what the script has done to the model since the last work.
        """
        self._own = None
        if own is not None:
            self.note(own, self.made)
            self._own = self._works[-1]
        self.made += 1
        return self.made

    def unmake(self) -> None:
        """It was not made, as what it was to be made with has failed."""
        self.made -= 1
        self._works = [work for work in self._works if work is not self._own]

    def arrived(self, number: int) -> None:
        """This copy is safe by now."""
        self.safe = max(self.safe, number)
        self._works = [work for work in self._works if work.copy >= self.safe]

    def clear(self) -> None:
        """The script has everything."""
        self._works.clear()
