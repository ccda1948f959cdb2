"""The one thread that uses the pipeline: it takes requests of others, and brings them forward."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from penstock.errors import ClosedError, WorkerError, WorkerTimeout
from penstock.generation.generate import Job
from penstock.serving.predictor import Prediction
from penstock.serving.refusal import Refusal

AnyJob = Job | Prediction

_IDLE = 0.5  # seconds between two looks at the time when there is nothing to do


class Work(Protocol):
    """A `Generator` or a `Predictor`."""

    def add(self, job: Any) -> None:
        """Take one more job."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""

    def step(self) -> Sequence[Any]:
        """Bring one of the jobs forward."""

    def cancel(self, job: Any) -> None:
        """End a job."""

    def close(self) -> None:
        """End all jobs."""


Emit = Callable[[int, Sequence[int], bool], None]
"""Called with the number of a job in its request, its new tokens, and whether it is over."""


@dataclass(eq=False)
class Ticket:
    """A request that was accepted.

    Attributes:
        jobs: of the request.
        emit: is told of them, by the thread of the engine.
        since: when it was accepted, of `time.monotonic()`.
        left: the numbers of jobs that are not over.
    """

    jobs: Sequence[AnyJob]
    emit: Emit
    since: float = field(default_factory=time.monotonic)
    left: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = set(range(len(self.jobs)))


@dataclass(frozen=True)
class _Cancel:
    ticket: Ticket


@dataclass(frozen=True)
class _Stop:
    grace: float


class Engine:
    """Runs jobs in the thread that calls `run`; others `submit` and `cancel` them.

    Args:
        work: does them.
        most: how many jobs there may be at a time, those that wait included.
        rest: called when nothing is under way any more.
        check: raises if the pipeline cannot be used any more.

    Attributes:
        ready: whether requests are taken.
    """

    def __init__(
        self, work: Work, most: int, rest: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self._work = work
        self._most = most
        self._rest = rest
        self._check = check
        self._inbox: SimpleQueue[Ticket | _Cancel | _Stop] = SimpleQueue()
        self._tickets: dict[Ticket, None] = {}  # of the engine's thread
        self._lock = threading.Lock()  # of the following
        self._open = 0
        self._seconds = 1.0  # that a job took, in the mean of the latest
        self._refuses: str | None = "the server has not begun yet"
        self._stop_at = math.inf

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._refuses is None

    @property
    def open(self) -> int:
        """How many jobs there are, those that wait included."""
        return self._open

    # -- for other threads ------------------------------------------------------------------

    def check_count(self, count: int) -> None:
        """Raise if a request has more jobs than there is ever room for.

        Args:
            count: how many jobs it has.

        Raises:
            Refusal: it has too many.
        """
        if count > self._most:
            raise Refusal(
                400,
                f"a request for {count} sequences is refused, as the server has room for "
                f"{self._most} in all: split it, or start the server with a larger --queue",
                param="prompt",
            )

    def submit(self, jobs: Sequence[AnyJob], emit: Emit) -> Ticket:
        """Have these jobs done.

        Args:
            jobs: of one request.
            emit: is told what comes of them; called in the thread of the engine.

        Raises:
            Refusal: there are too many jobs, or the server stops.
        """
        self.check_count(len(jobs))
        with self._lock:
            if self._refuses is not None:
                raise Refusal(503, self._refuses, code="not_serving")
            if self._open + len(jobs) > self._most:
                after = max(1, math.ceil(self._seconds))
                raise Refusal(
                    429,
                    f"{self._open} sequences are being generated or wait, and there is room for "
                    f"{self._most}: try again in {after} s",
                    code="queue_full",
                    retry_after=after,
                )
            self._open += len(jobs)
            ticket = Ticket(jobs, emit)
            self._inbox.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Have a request ended, if it is not over."""
        self._inbox.put(_Cancel(ticket))

    def stop(self, grace: float) -> None:
        """Take no more requests, and end when the present ones are over, or after a time of grace.

        It may be called at any moment, also by a signal handler.

        Args:
            grace: seconds after which requests that are not over are ended.
        """
        self._inbox.put(_Stop(grace))  # this queue may be put to in the midst of its own methods

    # -- the engine's own thread ------------------------------------------------------------

    def run(self) -> None:
        """Do jobs until `stop` is called.

        Raises:
            Exception: what has made the pipeline useless; all requests have been told.
        """
        with self._lock:
            self._refuses = None
        why = Refusal(503, "the server was stopped before this was done", code="stopped")
        try:
            while not self._is_done():
                if self._work.is_idle:
                    self._rest()
                self._receive()
                self._advance()
        except Exception as error:
            why = Refusal(500, f"the server has failed: {_said(error)}", code=type(error).__name__)
            raise
        finally:
            self._end(why)

    def _advance(self) -> None:
        """Bring one job forward, if there is one, and tell what has come of it."""
        if not self._work.is_idle:
            self._work.step()
            self._report()

    def _is_done(self) -> bool:
        """Whether it was stopped, and nothing is left or time is over."""
        if math.isinf(self._stop_at):
            return False
        return not self._tickets or time.monotonic() >= self._stop_at

    def _receive(self) -> None:
        """Take what others have put; wait for it if there is nothing to do."""
        wait = self._work.is_idle
        while True:
            try:
                what = self._inbox.get(timeout=_IDLE) if wait else self._inbox.get_nowait()
            except Empty:
                return
            wait = False
            if isinstance(what, Ticket):
                self._tickets[what] = None
                for job in what.jobs:
                    self._work.add(job)
            elif isinstance(what, _Cancel):
                self._cancel(what.ticket)
            else:
                self._stopping(what.grace)

    def _stopping(self, grace: float) -> None:
        with self._lock:
            self._refuses = "the server is stopping"
        self._stop_at = min(self._stop_at, time.monotonic() + grace)
        # what was submitted before is in the inbox, and is taken before the next look at the time

    def _cancel(self, ticket: Ticket, why: Exception | None = None) -> None:
        """End the jobs of a request that are not over."""
        for number in sorted(ticket.left):
            job = ticket.jobs[number]
            self._work.cancel(job)
            job.error = job.error or why
            self._emit(ticket, number)

    def _report(self) -> None:
        """Hand out new tokens, and say which jobs are over."""
        broken = False
        for ticket in list(self._tickets):
            for number in sorted(ticket.left):
                self._emit(ticket, number)
                error = ticket.jobs[number].error
                broken |= isinstance(error, (ClosedError, WorkerError, WorkerTimeout))
        if broken:
            self._check()

    def _emit(self, ticket: Ticket, number: int) -> None:
        job = ticket.jobs[number]
        tokens = [int(each.tokens[0]) for each in job.new_tokens()]
        if tokens or job.is_over:
            ticket.emit(number, tokens, job.is_over)
        if job.is_over:
            ticket.left.discard(number)
            with self._lock:
                self._open -= 1
                self._seconds += (time.monotonic() - ticket.since - self._seconds) / 8
        if not ticket.left:
            self._tickets.pop(ticket, None)

    def _end(self, why: Refusal) -> None:
        """Take nothing more, and end all that is left."""
        with self._lock:
            self._refuses = "the server is stopping" if why.status == 503 else why.message
            while True:
                try:
                    what = self._inbox.get_nowait()
                except Empty:
                    break
                if isinstance(what, Ticket):
                    self._tickets[what] = None
        self._work.close()
        for ticket in list(self._tickets):
            self._cancel(ticket, why)


def _said(error: BaseException) -> str:
    """An error in one line, by its class."""
    return f"{type(error).__name__}: {error}"
