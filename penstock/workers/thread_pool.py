"""Workers that are threads of this process: one per device, all on the user's own parameters.

If there is only one, the calling thread may do its job itself. Otherwise the work would move from
one core to the other and back with every step, where caches are cold and the core has been idle:
steps of 400 tiny calls take half as long again.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from penstock.devices.allocator import Mapped, is_on_main_heap, start_on_main_heap
from penstock.devices.cores import end_idle_threads, use_threads
from penstock.devices.streams import on
from penstock.errors import IN_A_FORK, TORN
from penstock.forks import disown_in_forks
from penstock.interrupts import is_interrupt, signals_wait
from penstock.links.local import Aborted
from penstock.workers.pool import Dispatch, Job, JobResult, Late, Pool

_GRACE = 5.0  # seconds that workers have to notice that a step was given up
_FRAMES = 4  # of the stack of a worker that is late


class Waking(Dispatch):
    """A dispatch whose workers ring: the last one that is done, and each that fails.

    The results do not travel through the queue: a Ctrl-C that arrives just as the queue gives
    something out would lose it. The queue only wakes.

    Attributes:
        here: whether the calling thread does the job.
    """

    here = False

    def __init__(self, number: int, count: int) -> None:
        super().__init__(number)
        self._count = count
        self.wakeup: SimpleQueue[None] = SimpleQueue()

    def report(self, worker: int, result: JobResult) -> None:
        """Called by the worker; what it says first counts."""
        self.results.setdefault(worker, result)
        if result.error is not None or len(self.results) == self._count:
            self.wakeup.put(None)


_Order = tuple[Job, Waking]


class ThreadPool(Pool):
    """A thread per device, which runs one job at a time and waits for the next.

    Args:
        devices: one per worker; a device may be listed twice.
        threads: intra-op threads of each CPU worker.
        abort: called when a job failed; must wake every worker that waits for another.
        reset: called when all have stopped after that, before the next jobs.
        doing: says what a worker is doing, for the message of a timeout.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        threads: int,
        abort: Callable[[], None],
        reset: Callable[[], None],
        doing: Callable[[int], str] = lambda worker: "busy",
    ) -> None:
        super().__init__(len(devices), _GRACE, reset)
        self._threads_each = threads
        self._caller: int | None = None  # the thread that does a job itself
        self._has_idle = False  # whether workers have intra-op threads that wait for an operation
        self._wake = abort
        self._doing = doing
        self._inboxes: list[SimpleQueue[_Order | None]] = [SimpleQueue() for _ in devices]
        self._threads: list[threading.Thread] = []
        self._threads += [
            threading.Thread(
                target=_serve,
                args=(_Worker(index, device, threads, inbox, self._threads),),
                name=f"penstock-{index}",
                daemon=True,  # an interpreter that ends does not wait for them
            )
            for index, (device, inbox) in enumerate(zip(devices, self._inboxes, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _dismiss, self._inboxes)
        disown_in_forks(self)

    def join(self, timeout: float) -> None:
        """Wait until the threads of closed workers have ended."""
        deadline = time.monotonic() + timeout
        for index in range(len(self._threads)):
            while (thread := self._threads[index]).is_alive() and time.monotonic() < deadline:
                thread.join(max(0.0, deadline - time.monotonic()))

    def disown(self) -> None:
        """In a fork, which has none of the threads: nobody would ever answer."""
        self._finalizer.detach()
        self._threads.clear()
        self._closed_because = self._closed_because or IN_A_FORK

    def start(
        self, jobs: Sequence[Job], timeout: float | None = None, whole: bool = False
    ) -> Dispatch:
        """Give each worker one more job; the caller's idle intra-op threads end first."""
        end_idle_threads(self._threads_each)
        self._has_idle = self._threads_each > 1
        return super().start(jobs, timeout, whole)

    def run_here(self, job: Job) -> Any:
        """Do a job of the only worker in the calling thread; signals wait until it is done.

        A second Ctrl-C does not wait, and closes the workers.

        Raises:
            Exception: what the job has raised.
        """
        with signals_wait():
            current = self.start_here(job, whole=True)
            error = current.results[0].error
            if error is not None and is_interrupt(error):
                self._part(f"{type(error).__name__} came as the job was half done: {TORN}")
            (value,) = self.finish(current)
        return value

    def start_here(self, job: Job, whole: bool = False) -> Dispatch:
        """Do a job of the only worker in the calling thread, before this returns.

        Args:
            job: what is done. No other may be under way.
            whole: whether the job may not be left half done, see `start`.

        Returns:
            what `finish` takes.
        """
        if self._has_idle:
            self.run([partial(end_idle_threads, self._threads_each)])
            self._has_idle = False
        current = Waking(self._dispatches, 1)
        current.here = True
        return self._begin(current, [job], None, whole)

    def _dispatch(self, number: int) -> Dispatch:
        return Waking(number, self._count)

    def _give(self, worker: int, job: Job, current: Dispatch) -> None:
        if not current.here:  # type: ignore[attr-defined]
            self._inboxes[worker].put((job, current))  # type: ignore[arg-type]
            return
        before = torch.get_num_threads(), torch.is_grad_enabled()
        try:
            result = self._done_here(job)
        finally:  # again, as a Ctrl-C may have come amid the first time
            self._as_before(*before)
        current.report(worker, result)  # type: ignore[attr-defined]

    def _done_here(self, job: Job) -> JobResult:
        """Do a job as a worker does, whatever the script has set in its thread."""
        before = torch.get_num_threads(), torch.is_grad_enabled()
        try:
            self._caller = threading.get_ident()
            torch.set_num_threads(self._threads_each)
            with torch.inference_mode(False):
                return _done(job)
        finally:
            self._as_before(*before)

    def _as_before(self, threads: int, grad: bool) -> None:
        """Give the calling thread these settings of the script's again."""
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        self._caller = None

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is doing a job itself."""
        return self._caller == threading.get_ident()

    def _recall(self, current: Dispatch) -> None:
        for worker in current.waits_for:  # after its job, if it has got that
            self._inboxes[worker].put((_never_given, current))  # type: ignore[arg-type]

    def _await_report(self, current: Dispatch, seconds: float | None) -> None:
        try:
            current.wakeup.get(timeout=seconds)  # type: ignore[attr-defined]
        except Empty:
            raise Late from None

    def _abort(self) -> None:
        self._wake()

    def describe(self, workers: Sequence[int]) -> dict[int, str]:
        frames = sys._current_frames()
        found = {}
        for worker in workers:
            frame = frames.get(self._caller or self._threads[worker].ident or 0)
            stack = traceback.format_stack(frame)[-_FRAMES:] if frame else []
            found[worker] = "\n".join([self._doing(worker), "".join(stack).rstrip()])
        return found

    def _dismiss(self) -> None:
        """Idle ones end at once, a busy one after its job."""
        self._finalizer()


def _dismiss(inboxes: Sequence[SimpleQueue[_Order | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class _Worker(NamedTuple):
    """What the thread of a worker has, and the one that takes its place.

    Attributes:
        number: of the worker.
        device: that it computes on.
        threads: intra-op threads, if that is a CPU.
        inbox: its jobs.
        all: the threads of all workers.
    """

    number: int
    device: torch.device
    threads: int
    inbox: SimpleQueue[_Order | None]
    all: list[threading.Thread]


def _serve(worker: _Worker, may_give_way: bool = True) -> None:
    """Do the jobs in the inbox until there is a `None`; runs as the thread of a worker.

    Args:
        worker: whose thread it is.
        may_give_way: whether another thread goes on if the memory of this one is mapped anew in
            every job, see `start_on_main_heap`; that happens once.
    """
    use_threads(worker.threads)
    mapped = Mapped() if may_give_way and worker.device.type == "cpu" else None
    with on(worker.device):
        while (order := worker.inbox.get()) is not None:
            job, current = order
            result = _done(job)
            del order, job  # what they hold goes before the result is reported
            current.report(worker.number, result)
            del current, result
            if mapped is not None and mapped.after_job():
                mapped = None
                if _gives_way(worker):
                    return


def _done(job: Job) -> JobResult:
    """Do a job, whatever it raises."""
    try:
        return JobResult(job(), None)
    except BaseException as error:
        return JobResult(None, error)


def _gives_way(worker: _Worker) -> bool:
    """Have another thread, on the main heap, go on with the jobs; whether there is one."""
    name = threading.current_thread().name
    try:
        if is_on_main_heap():
            return False
        thread = start_on_main_heap(_serve, worker, False, name=name)
    except (RuntimeError, MemoryError):  # there may be no more threads, or the interpreter ends
        return False
    if thread is None:
        return False
    worker.all[worker.number] = thread
    return True


def _never_given() -> None:
    raise Aborted
