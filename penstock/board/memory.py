"""The memory of a board: a record for each worker, and one for the passes of the pipeline.

Every record has one writer, who never waits: a few integers are stored where it begins something
else, with the time on the clock that all processes of a machine share. Readers map the same file
(or use the same object) and take what is there. It needs no lock: integers of 64 bits are read and
written whole, and a reader that sees what is done now change while it reads looks again.
"""

from __future__ import annotations

import mmap
import os
import statistics
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Protocol

from penstock.board.activity import Activity, is_waiting, waiting, within
from penstock.files import anonymous_memory

DESCRIPTION = ".json"
"""The suffix of the file beside a board's that says what it is of, and is removed with it."""

Log = list[tuple[int, int]]
"""What a worker has noted: when, by `time.monotonic_ns()`, and which code."""


class Noting(Protocol):
    """What a worker's notes are added to: a `Log`, or one with the times of the device's stream."""

    def append(self, entry: tuple[int, int], /) -> None:
        """Keep one more of what is in a `Log`."""


_CELLS = 8  # of 64 bits, for each worker
_CODE, _SINCE, _WORKED, _WAITED, _PASSES, _HELD, _MOST_HELD = range(7)

_STEPS, _ROWS, _TOKENS, _OTHERS, _BEGUN, _NUMBER = range(6)  # of the pipeline
_RING = 8  # where the latest steps are noted
_LATEST = 65  # places, of which one may be about to be written
_EACH = 5  # when one ended, how long it took, its rows, tokens, whether it was as planned
_PIPELINE = _RING + _LATEST * _EACH


def moved(logs: Mapping[int, Log], by: int) -> dict[int, Log]:
    """The logs of workers with times that are later by so many nanoseconds."""
    return {worker: [(then + by, code) for then, code in log] for worker, log in logs.items()}


@dataclass(frozen=True)
class Reading:
    """What a worker's record says.

    Attributes:
        code: what it is doing, as `penstock.board.activity` has it; 0 for nothing.
        since: when it began that, in nanoseconds of `time.monotonic_ns()`; 0 if it never began
            anything.
        worked: nanoseconds that it has worked in passes so far, what it does now included.
        waited: nanoseconds that it has waited for values of others in passes.
        passes: that it has completed.
        held: bytes of its device's memory that are in use, as of its latest pass; 0 on CPUs, whose
            processes share theirs.
        most_held: the most that were.
    """

    code: int
    since: int
    worked: int
    waited: int
    passes: int
    held: int
    most_held: int

    @classmethod
    def nothing(cls) -> Reading:
        """The reading of a worker whose record cannot be seen from here: idle, all counts 0."""
        return cls(0, 0, 0, 0, 0, 0, 0)

    @property
    def activity(self) -> Activity:
        """What it is doing."""
        return Activity.of(self.code)


class Record:
    """One worker's record; only the worker writes it.

    Args:
        cells: of the board; by default nobody else sees them.

    Attributes:
        log: if not `None`, what is noted is kept there as well, see `Log`.
    """

    __slots__ = ("_cells", "_now", "_state", "log")

    def __init__(self, cells: memoryview | None = None) -> None:
        cells = memoryview(array("q", [0] * _CELLS)) if cells is None else cells
        self._cells, self._now = cells, cells[: _WAITED + 1]
        self._state = array("q", self._now)
        self.log: Noting | None = None

    @property
    def code(self) -> int:
        """What the worker is doing, as `penstock.board.activity` has it; 0 for nothing."""
        return self._state[_CODE]

    def note(self, code: int) -> None:
        """Note what the worker does from now on, by a code as `code` has it."""
        now, state = monotonic_ns(), self._state
        before = state[_CODE]
        if before > 0:
            state[_WAITED if is_waiting(before) else _WORKED] += now - state[_SINCE]
        state[_CODE], state[_SINCE] = code, now
        self._now[:] = state  # at once, so that nobody sees half of it
        if self.log is not None:
            self.log.append((now, code))

    def enter(self, part: int) -> int:
        """From now on the worker does a part of its action; to be ended by a `note`.

        Args:
            part: of `penstock.board.activity`, such as `LOSS`.

        Returns:
            what it did before, to be noted then.
        """
        before = self._state[_CODE]
        if before > 0:
            self.note(within(before, part))
        return before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile the worker waits for others amid what it does, such as for its turn."""
        before = self.code
        self.note(waiting(before))
        try:
            yield
        finally:
            self.note(before)

    def count(self) -> None:
        """Count a pass that has ended well."""
        self._cells[_PASSES] += 1

    def hold(self, held: int, most_held: int) -> None:
        """So many bytes of the device's memory are in use, and were at most."""
        self._cells[_HELD], self._cells[_MOST_HELD] = held, most_held


@dataclass(frozen=True)
class StepTime:
    """A step that has ended.

    Attributes:
        end: when, in nanoseconds of `time.monotonic_ns()`.
        duration: nanoseconds that its passes took: not the optimizer, nor what came in between.
        rows: of its batch.
        tokens: of its batch: elements of the first integer input with at least two dimensions; 0 if
            there is none.
        as_planned: whether its batch had the size for which the plan was made.
    """

    end: int
    duration: int
    rows: int
    tokens: int
    as_planned: bool = True


@dataclass(frozen=True)
class Counted:
    """What the pipeline's record says.

    Attributes:
        steps: passes that computed gradients.
        rows: of their batches, in all.
        tokens: of their batches, in all, see `StepTime`.
        others: passes without gradients.
        begun: when the oldest pass that is under way began, in nanoseconds of
            `time.monotonic_ns()`; 0 between passes.
        latest: the last steps, oldest first.
    """

    steps: int
    rows: int
    tokens: int
    others: int
    begun: int
    latest: Sequence[StepTime]

    @property
    def step_seconds(self) -> float | None:
        """The median time of the passes of the latest steps; `None` before the first."""
        return _median(self.latest)

    @property
    def planned_seconds(self) -> float | None:
        """The same of those whose batch had the size for which the plan was made."""
        return _median([step for step in self.latest if step.as_planned])


def _median(steps: Sequence[StepTime]) -> float | None:
    return statistics.median(step.duration for step in steps) / 1e9 if steps else None


class Board:
    """Records of all workers, and of the passes of the pipeline, which the driver counts.

    Args:
        workers: how many.
        fd: of the memory, in another process than the one that made it; it is closed. `None` makes
            new memory.
        path: of a file for the memory, which is made; without one it has no name.
        writable: whether this process may write to it.

    Attributes:
        records: of every worker.
        fd: of the memory, for other processes; -1 where it was given.
        path: of its file, which is removed when the board is closed.
        closing: functions that are called when the board is closed.
        close: closes it; whoever has the board may go on using its memory.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        workers: int,
        fd: int | None = None,
        path: Path | None = None,
        writable: bool = True,
    ) -> None:
        cells = _PIPELINE + workers * _CELLS
        self.path = path
        self.fd = -1 if fd is not None else _memory(8 * cells, path)
        made = self.fd if fd is None else fd
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._cells = memoryview(mmap.mmap(made, 8 * cells, access=access)).cast("q")
        if fd is not None:
            os.close(fd)
        self.closing: list[Callable[[], object]] = []
        self.close = weakref.finalize(self, _close, self.fd, path, os.getpid(), self.closing)
        starts = range(_PIPELINE, cells, _CELLS)
        self.records = [Record(self._cells[start : start + _CELLS]) for start in starts]

    # -- the driver ---------------------------------------------------------------------------

    def note_begun(self, begun: int) -> None:
        """The oldest pass that is under way began then, by `time.monotonic_ns()`; 0 for none."""
        self._cells[_BEGUN] = begun

    def count(self, duration: int, rows: int, tokens: int, as_planned: bool = True) -> None:
        """A step has ended that took so many nanoseconds, see `StepTime`."""
        cells = self._cells
        place = _RING + cells[_STEPS] % _LATEST * _EACH
        cells[place], cells[place + 1] = monotonic_ns(), duration
        cells[place + 2], cells[place + 3] = rows, tokens
        cells[place + 4] = as_planned
        cells[_ROWS] += rows
        cells[_TOKENS] += tokens
        cells[_STEPS] += 1

    def go_on(self, before: Board) -> None:
        """Go on counting where the board of another plan of the same pipeline has ended."""
        self._cells[:_PIPELINE] = before._cells[:_PIPELINE]
        self._cells[_BEGUN] = 0
        for place in range(_RING, _PIPELINE, _EACH):
            self._cells[place + 4] = False

    def count_other(self) -> None:
        """Count a pass without gradients that has ended."""
        self._cells[_OTHERS] += 1

    # -- readers ------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The steps counted so far."""
        return self._cells[_STEPS]

    def reading(self, worker: int) -> Reading:
        """What a worker is doing now, and its sums of work and waiting in nanoseconds up to now."""
        start = _PIPELINE + worker * _CELLS
        cells = self._cells[start : start + _CELLS].tolist()
        for _ in range(8):  # until it does not change meanwhile; a busy worker may always do
            again = self._cells[start : start + _CELLS].tolist()
            if again[_CODE] == cells[_CODE] and again[_SINCE] == cells[_SINCE]:
                break
            cells = again
        code, since, worked, waited, passes, held, most_held = cells[:7]
        now = max(0, monotonic_ns() - since) if code > 0 else 0
        worked, waited = (worked, waited + now) if is_waiting(code) else (worked + now, waited)
        return Reading(code, since, worked, waited, passes, held, most_held)

    def readings(self) -> list[Reading]:
        """What the records of all workers say now."""
        return [self.reading(worker) for worker in range(len(self.records))]

    def counted(self) -> Counted:
        """The steps counted so far, and times of the latest, oldest first."""
        cells = self._cells[:_PIPELINE].tolist()
        while self._cells[_STEPS] != cells[_STEPS]:  # a step has ended meanwhile
            cells = self._cells[:_PIPELINE].tolist()
        steps = cells[_STEPS]  # the place of the oldest may be that of a step that ends now
        places = [_RING + k % _LATEST * _EACH for k in range(max(0, steps - _LATEST + 1), steps)]
        latest = [_step_time(*cells[place : place + _EACH]) for place in places]
        return Counted(steps, cells[_ROWS], cells[_TOKENS], cells[_OTHERS], cells[_BEGUN], latest)


def _step_time(end: int, duration: int, rows: int, tokens: int, as_planned: int) -> StepTime:
    return StepTime(end, duration, rows, tokens, bool(as_planned))


def opened(path: Path, workers: int) -> Board:
    """The board of another process, to be read.

    Raises:
        OSError: there is no such file any more.
        ValueError: it is no board of so many workers.
    """
    return Board(workers, os.open(path, os.O_RDONLY | os.O_CLOEXEC), writable=False)


def _memory(size: int, path: Path | None) -> int:
    """A file descriptor of new memory."""
    if path is None:
        return anonymous_memory(size)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # or a full disk would end the process later
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def _close(
    fd: int, path: Path | None, process: int, closing: Sequence[Callable[[], object]]
) -> None:
    for close in closing:
        close()
    if fd >= 0:
        os.close(fd)
    if path is not None and os.getpid() == process:  # and not a fork of it
        for each in (path.with_suffix(DESCRIPTION), path):
            each.unlink(missing_ok=True)
