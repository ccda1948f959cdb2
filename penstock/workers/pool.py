"""Jobs for all workers at once, and what becomes of them, whatever kind of worker does them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.engine.orders import Order, Outcome
from penstock.errors import BY_USER, TORN, ClosedError, WorkerDied, WorkerTimeout, closed
from penstock.links.local import Aborted
from penstock.workers.heartbeat import STOPPED

Job = Callable[..., Any]

_SLICE = 1.0  # seconds that are waited at once


class Late(Exception):  # noqa: N818 - never reaches a user: WorkerTimeout does
    """No worker reported in time."""


class JobResult(NamedTuple):
    """What one worker's job returned, or raised."""

    value: Any
    error: BaseException | None


class Dispatch:
    """One job for each worker, and what has become of them so far.

    Attributes:
        number: dispatches are counted from 0.
        timeout: seconds that a worker may take to read its job; `None` if there is no limit.
        whole: whether the jobs belong together so that none may be left out.
        given: the workers that have their job.
        results: of the workers that are done.
    """

    timeout: float | None = None
    whole = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.given: set[int] = set()
        self.results: dict[int, JobResult] = {}

    @property
    def waits_for(self) -> list[int]:
        """The workers that are not done."""
        return sorted(self.given - self.results.keys())

    def failures(self) -> list[BaseException]:
        """What was raised; `Aborted`, from workers that were only made to stop, comes last."""
        errors = [r.error for r in list(self.results.values()) if r.error is not None]
        return sorted(errors, key=lambda error: isinstance(error, Aborted))


@dataclass(eq=False)
class PassTicket:
    """A pass that the workers of a pool were given, see `Ticket` in `penstock.workers.backend`.

    Attributes:
        end: waits for it, and undoes it if it fails.
        order: the pass.
        dispatch: the workers' parts of it; set last, so that no Ctrl-C comes after it.
    """

    end: Callable[[Order, Dispatch], Outcome]
    order: Order
    dispatch: Dispatch = field(init=False)

    def finish(self) -> Outcome:
        """Wait for it, see `Ticket`."""
        return self.end(self.order, self.dispatch)


class Pool(ABC):
    """Workers that take one job after the other, all of them at the same time.

    Args:
        count: how many.
        grace: seconds that they have to stop when a dispatch is given up.
        reset: called when all have stopped after that, before the next jobs.

    Attributes:
        keeps_survivors: whether others can go on, if some have ended.
        leaving: the workers that were asked to end, by a SIGTERM.
    """

    keeps_survivors = False
    _can_be_killed = False  # if one has failed, those that cannot be are waited for longer

    def __init__(self, count: int, grace: float, reset: Callable[[], None]) -> None:
        self._count = count
        self._grace = grace
        self._reset = reset
        self._dispatches = 0
        self._open: list[Dispatch] = []
        self._closed_because: str | None = None
        self.leaving: set[int] = set()

    def __len__(self) -> int:
        return self._count

    @property
    def under_way(self) -> bool:
        """Whether there are jobs that were started, and neither finished nor given up."""
        return bool(self._open)

    def check_open(self) -> None:
        """Raise if they cannot work any more.

        Raises:
            ClosedError: they were closed.
        """
        if self._closed_because:
            raise closed(self._closed_because)

    def all_alive(self) -> bool:
        """Whether they are not closed, and none has ended, as far as is known."""
        return self._closed_because is None

    def run(
        self, jobs: Sequence[Job], timeout: float | None = None, whole: bool = False
    ) -> list[Any]:
        """Run one job on each worker at the same time, and wait for all of them; see `finish`."""
        try:
            return self.finish(self.start(jobs, timeout, whole), timeout)
        except Exception:
            raise
        except BaseException as interruption:  # which may come between the two
            self.give_up(interruption)
            raise

    def start(
        self, jobs: Sequence[Job], timeout: float | None = None, whole: bool = False
    ) -> Dispatch:
        """Give each worker one more job, after those that it has.

        Args:
            jobs: by worker.
            timeout: seconds that a worker may take to read its job.
            whole: do all jobs or none of them, even if the user interrupts; if that cannot be, the
                workers are closed.

        Raises:
            ClosedError: the workers were closed.
            WorkerTimeout: one does not read its job.
        """
        return self._begin(self._dispatch(self._dispatches), jobs, timeout, whole)

    def _begin(
        self, current: Dispatch, jobs: Sequence[Job], timeout: float | None, whole: bool
    ) -> Dispatch:
        """Give each worker its job of a new dispatch, see `start`."""
        self.check_open()
        current.timeout, current.whole = timeout, whole
        self._dispatches += 1
        try:
            self._open.append(current)
            for worker, job in enumerate(jobs):
                current.given.add(worker)
                self._give(worker, job, current)
        except BaseException as interruption:  # the user's Ctrl-C, or a job that cannot be sent
            self._recall(current)
            begun = bool(current.given)
            parted = whole and begun and not isinstance(interruption, Exception)
            self._give_up(interruption)
            if parted:
                self._part(f"{type(interruption).__name__} came as jobs were given out: {TORN}")
            raise
        return current

    def finish(self, current: Dispatch, timeout: float | None = None) -> list[Any]:
        """Wait for the jobs of a dispatch.

        Returns:
            the results, by worker.

        Raises:
            WorkerTimeout: one did not finish within `timeout` seconds.
            Exception: what the first job that failed raised. All the others have stopped, those
                of dispatches that were started after it as well, and the workers can be used again,
                unless one is gone or did not stop.
        """
        self.check_under_way(current)
        try:
            self._collect([current], timeout, hasty=self._can_be_killed)
        except Late:
            error = self._late(current, timeout or 0.0)
            self._give_up(error)
            raise error from None
        except BaseException as interruption:  # the user's Ctrl-C
            self._give_up(interruption)
            raise
        failures = current.failures()
        if failures:
            late, why = current.waits_for, self._closed_because
            self._give_up(failures[0])
            raise self._fault(current, late, why)
        self._open.remove(current)
        return [current.results[worker].value for worker in range(self._count)]

    def give_up_late(self, timeout: float) -> None:
        """Give up whatever is under way, as somebody has taken longer than these seconds.

        Raises:
            WorkerTimeout: who.
        """
        late = [current for current in self._open if current.waits_for]
        error = self._late(late[0], timeout) if late else None
        if error is not None:
            self._give_up(error)
            raise error

    def _collect(
        self, dispatches: Sequence[Dispatch], timeout: float | None, hasty: bool = False
    ) -> None:
        """Wait until every worker has done its jobs; at the first failure wake the others.

        Args:
            dispatches: whose jobs.
            timeout: seconds in all. Time in which this process itself was stopped does not count.
            hasty: whether to wait for no more when one has failed.

        Raises:
            Late: it took longer, or would, as a worker is stopped.
        """
        left = timeout
        for current in dispatches:
            while current.waits_for and not (hasty and current.failures()):
                begun = time.monotonic()
                try:
                    self._await_report(current, _SLICE if left is None else min(left, _SLICE))
                except Late:
                    if (left is not None and left <= _SLICE) or self._stopped():
                        raise
                if left is not None:
                    left = max(0.0, left - min(time.monotonic() - begun, 2 * _SLICE))
                if current.failures() and not hasty:
                    self._abort()

    def _late(self, current: Dispatch, timeout: float) -> WorkerTimeout | WorkerDied:
        """The error for workers that are late."""
        late, stopped = current.waits_for, self._stopped()
        busy = [worker for worker in late if not self._waits(worker)]
        culprit = (stopped or busy or late)[0]
        where = self._at(culprit)
        details = self.describe(range(self._count))
        if stopped:
            first = f"worker {', '.join(map(str, stopped))} is {STOPPED}"
        else:
            first = (
                f"worker {', '.join(map(str, late))} did not finish within {timeout:.0f} s; "
                "give Pipeline a larger timeout= if its work takes longer than that"
            )
        lines = [first, *(f"worker {worker} is {what}" for worker, what in details.items())]
        return WorkerTimeout("\n".join(lines), culprit, *where)

    def _fault(self, current: Dispatch, late: Sequence[int], why: str | None) -> BaseException:
        """What is to be raised for a dispatch that failed.

        Args:
            current: the dispatch.
            late: the workers that had not answered when that was noticed.
            why: why the workers had been closed by then, by another thread, if they had.
        """
        error = current.failures()[0]
        if isinstance(error, Aborted) and why:
            error = closed(why)
        elif isinstance(error, Aborted):  # because of one that never said why it broke off
            numbers = ", ".join(map(str, late)) or "one"
            error = WorkerTimeout(f"the link to worker {numbers} broke, and it did not say why")
        return error

    def check_under_way(self, current: Dispatch) -> None:
        """Raise if the jobs of a dispatch were given up.

        Raises:
            ClosedError: they were, as another dispatch failed.
        """
        if current not in self._open:
            raise ClosedError("a pass that was started with this one has failed")

    def give_up(self, why: BaseException) -> None:
        """Give up whatever is under way, for a caller who cannot `finish` it any more."""
        if self._open:
            self._give_up(why)

    def _recall(self, current: Dispatch) -> None:
        """After an interruption of `start`: do not wait for jobs that were never given."""
        return

    def _give_up(self, why: BaseException) -> None:
        """Wake everybody and wait for `grace` seconds; close the pool if a worker is busy then."""
        dispatches, self._open = self._open, []
        try:
            if not any(current.whole for current in dispatches):
                self._abort()
            self._collect(dispatches, self._grace)
        except Late:
            self.fail(f"a worker was still busy {self._grace:.0f} s after {type(why).__name__}")
        except BaseException as again:  # an impatient user
            self._part(f"{type(again).__name__} came while the workers were being stopped")
            raise
        else:
            if broken := self._broken():
                self.fail(broken)
            else:
                self._reset()

    def fail(self, why: str) -> None:
        """Close the pool, as its workers cannot go on; `why` is what later calls will say."""
        self.close(why)

    def _part(self, why: str) -> None:
        """Close the pool, as nobody knows which workers have done the last job."""
        self.close(why)

    def _broken(self) -> str | None:
        """Why the workers cannot go on after a failure, if they cannot."""
        return None

    def close(self, why: str = BY_USER) -> None:
        """Let the workers go, for good; `why` is what later calls will say."""
        if self._closed_because is None:
            self._closed_because = why
            self._dismiss()

    def _dispatch(self, number: int) -> Dispatch:
        """A dispatch of the kind that these workers report to."""
        return Dispatch(number)

    @abstractmethod
    def _give(self, worker: int, job: Job, current: Dispatch) -> None:
        """Give a worker its job."""

    @abstractmethod
    def _await_report(self, current: Dispatch, seconds: float | None) -> None:
        """Wait until some worker reports, and note what it does; raises `Late` if none does."""

    @abstractmethod
    def _abort(self) -> None:
        """Wake every worker that waits for another one."""

    @abstractmethod
    def describe(self, workers: Sequence[int]) -> dict[int, str]:
        """What workers are doing, for the message of a timeout."""

    def _stopped(self) -> list[int]:
        """The workers that a signal has stopped, and that have not gone on for seconds."""
        return []

    def _waits(self, worker: int) -> bool:
        """Whether a worker waits for another one, as far as that is known."""
        return False

    def _at(self, worker: int) -> tuple[int | None, int | None, str]:
        """The stage, the micro-batch and the action at which a worker is, if they are known."""
        return None, None, ""

    @abstractmethod
    def _dismiss(self) -> None:
        """End the threads or processes, and give up what they still do."""
