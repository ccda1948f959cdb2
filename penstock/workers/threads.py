"""Workers that are threads of this process: one per device, all on the user's own parameters."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from penstock.cores import use_threads
from penstock.errors import ClosedError, WorkerTimeout
from penstock.links.local import Aborted

Job = Callable[[], Any]

_GRACE = 5.0  # seconds that workers have to notice that a step was given up


class _Outcome(NamedTuple):
    result: Any
    error: BaseException | None


class _Round:
    """One job for each worker, and what has become of them so far.

    The outcomes do not travel through the queue: a Ctrl-C that arrives just as the queue gives
    something out would lose it. The queue only rings.
    """

    def __init__(self) -> None:
        self.outcomes: dict[int, _Outcome] = {}
        self._bell: SimpleQueue[None] = SimpleQueue()

    def report(self, worker: int, outcome: _Outcome) -> None:
        """Called by the worker."""
        self.outcomes[worker] = outcome
        self._bell.put(None)

    def wait(self, seconds: float | None) -> None:
        """Until some worker reports; raises `Empty` if none does."""
        self._bell.get(timeout=seconds)

    def failures(self) -> list[BaseException]:
        """What was raised, the workers that were merely told to stop last."""
        errors = [o.error for o in list(self.outcomes.values()) if o.error is not None]
        return sorted(errors, key=lambda error: isinstance(error, Aborted))


_Order = tuple[Job, _Round]


class ThreadWorkers:
    """A thread per device, which runs one job at a time and waits for the next.

    Args:
        devices: one per worker; a device may be listed twice.
        threads: intra-op threads of each CPU worker.
        abort: called when a job failed; must wake every worker that waits for another.
        reset: called when all have stopped after that, before the next jobs.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        threads: int,
        abort: Callable[[], None],
        reset: Callable[[], None],
    ) -> None:
        self._abort = abort
        self._reset = reset
        self._inboxes: list[SimpleQueue[_Order | None]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(index, device, threads, inbox),
                name=f"penstock-{index}",
                daemon=True,  # an interpreter that ends does not wait for them
            )
            for index, (device, inbox) in enumerate(zip(devices, self._inboxes, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        self._closed_because: str | None = None
        self._finalizer = weakref.finalize(self, _dismiss, self._inboxes)

    def __len__(self) -> int:
        return len(self._threads)

    def run(self, jobs: Sequence[Job], timeout: float | None = None) -> list[Any]:
        """Run one job on each worker at the same time, and wait for all of them.

        Returns:
            the results, by worker.

        Raises:
            ClosedError: the workers were closed.
            WorkerTimeout: one did not finish within `timeout` seconds; the workers are closed.
            Exception: what the first job that failed raised. All the others have stopped, and
                the workers can be used again.
        """
        if self._closed_because:
            raise ClosedError(f"the pipeline is closed: {self._closed_because}")
        current = _Round()
        try:
            for inbox, job in zip(self._inboxes, jobs, strict=True):
                inbox.put((job, current))
            self._collect(current, timeout)
        except BaseException as interruption:  # a timeout, or the user's Ctrl-C
            self._give_up(current, interruption)
            raise
        failures = current.failures()
        if failures:
            self._reset()
            raise failures[0]
        return [current.outcomes[index].result for index in range(len(jobs))]

    def _collect(self, current: _Round, timeout: float | None) -> None:
        """Wait for every worker; at the first failure wake the others."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(current.outcomes) < len(self._threads):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                current.wait(left)
            except Empty:
                late = sorted(set(range(len(self._threads))) - set(current.outcomes))
                raise WorkerTimeout(
                    f"worker {', '.join(map(str, late))} did not finish within {timeout:.0f} s; "
                    "give Pipeline a larger timeout= if its work takes longer than that"
                ) from None
            if current.failures():
                self._abort()

    def _give_up(self, current: _Round, why: BaseException) -> None:
        """Wake everybody and wait a little; what still runs then closes the pipeline."""
        self._abort()
        try:
            self._collect(current, _GRACE)
        except WorkerTimeout:
            self.close(f"a worker was still busy {_GRACE:.0f} s after {type(why).__name__}")
        except BaseException as again:  # an impatient user
            self.close(f"{type(again).__name__} came while the workers were being stopped")
            raise
        else:
            self._reset()

    def close(self, why: str = "close() was called") -> None:
        """Dismiss the threads; idle ones end at once, a busy one after its job."""
        if self._closed_because is None:
            self._closed_because = why
            self._finalizer()

    def join(self, timeout: float) -> None:
        """Wait until the threads of closed workers have ended."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _dismiss(inboxes: Sequence[SimpleQueue[_Order | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _serve(
    index: int,
    device: torch.device,
    threads: int,
    inbox: SimpleQueue[_Order | None],
) -> None:
    """A worker's life."""
    use_threads(threads)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        while (order := inbox.get()) is not None:
            job, current = order
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:
                error = raised
            del order, job  # what they hold goes before the caller is told
            current.report(index, _Outcome(result, error))
            del current, result, error
