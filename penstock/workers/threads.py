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

from penstock.errors import ClosedError, WorkerTimeout
from penstock.links.local import Aborted

Job = Callable[[], Any]

_GRACE = 5.0  # seconds that workers have to notice that a step was given up


class _Outcome(NamedTuple):
    worker: int
    result: Any
    error: BaseException | None


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
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._inboxes: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(index, device, threads, inbox, self._outcomes),
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
        for inbox, job in zip(self._inboxes, jobs, strict=True):
            inbox.put(job)
        outcomes: dict[int, _Outcome] = {}
        try:
            self._collect(outcomes, timeout)
        except BaseException as interruption:  # a timeout, or the user's Ctrl-C
            self._give_up(outcomes, interruption)
            raise
        failures = [o.error for o in outcomes.values() if o.error is not None]
        if failures:
            self._reset()
            raise next((e for e in failures if not isinstance(e, Aborted)), failures[0])
        return [outcomes[index].result for index in range(len(jobs))]

    def _collect(self, outcomes: dict[int, _Outcome], timeout: float | None) -> None:
        """Wait for every worker; at the first failure wake the others."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(outcomes) < len(self._threads):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                outcome = self._outcomes.get(timeout=left)
            except Empty:
                late = sorted(set(range(len(self._threads))) - set(outcomes))
                raise WorkerTimeout(
                    f"worker {', '.join(map(str, late))} did not finish within {timeout:.0f} s; "
                    "give Pipeline a larger timeout= if its work takes longer than that"
                ) from None
            outcomes[outcome.worker] = outcome
            if outcome.error is not None and not isinstance(outcome.error, Aborted):
                self._abort()

    def _give_up(self, outcomes: dict[int, _Outcome], why: BaseException) -> None:
        """Wake everybody and wait a little; what still runs then closes the pipeline."""
        self._abort()
        try:
            self._collect(outcomes, _GRACE)
        except WorkerTimeout:
            self.close(f"a worker was still busy {_GRACE:.0f} s after {type(why).__name__}")
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


def _dismiss(inboxes: Sequence[SimpleQueue[Job | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _serve(
    index: int,
    device: torch.device,
    threads: int,
    inbox: SimpleQueue[Job | None],
    outcomes: SimpleQueue[_Outcome],
) -> None:
    """A worker's life."""
    torch.set_num_threads(threads)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        while (job := inbox.get()) is not None:
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:
                error = raised
            del job
            outcomes.put(_Outcome(index, result, error))
            del result, error
