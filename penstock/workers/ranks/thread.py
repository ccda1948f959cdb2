"""The thread of a rank that runs its part of passes, while the script's own goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from penstock.board.activity import Activity
from penstock.board.memory import Record
from penstock.errors import BY_USER, WorkerTimeout
from penstock.links.intake import Intake
from penstock.links.local import Aborted
from penstock.links.wire import Wire
from penstock.workers.pool import Dispatch, JobResult
from penstock.workers.thread_pool import ThreadPool, Waking

_SLICE = 1.0  # seconds that are waited at once
_GRACE = 5.0  # seconds that the thread has to end


class RankThread(ThreadPool):
    """One thread, which waits for values of neighbours by itself.

    The script's thread listens to the other ranks. If one has failed, it gives up what is under way
    here, which wakes this thread.

    Args:
        device: of this rank.
        threads: intra-op threads, if that is a CPU.
        reset: called when what was given up has stopped.
        record: where the thread notes what it is doing.

    Attributes:
        wakeup: a file descriptor that can be read when a pass has ended.
        dispatch: the number of the operation in which the pass was started that is run.
        intake: takes in what comes from neighbours while the thread waits.
    """

    def __init__(
        self,
        device: torch.device,
        threads: int,
        reset: Callable[[], None],
        record: Record,
    ) -> None:
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.dispatch = -1
        self.intake = Intake()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timeout, self._deadline = 0.0, 0.0
        self._reset_links = reset
        self._record = record
        doing = self._doing_now
        super().__init__([device], threads, self._signal_stop, self._clear, lambda worker: doing())

    def _doing_now(self) -> str:
        return str(Activity.of(self._record.code))

    # -- in the script's thread -------------------------------------------------------------

    def is_done(self, current: Dispatch) -> bool:
        """Whether a pass has ended; clears the wakeup."""
        self._drained(self.wakeup)  # first: what is signalled after this is seen
        return not current.waits_for

    def wake(self) -> None:
        """Let who waits for a pass look again; may be called from any thread."""
        if self.wakeup >= 0:
            os.eventfd_write(self.wakeup, 1)

    def close(self, why: str = BY_USER) -> None:
        """Dismiss the thread; a pass that it is in is given up."""
        if self._closed_because is None:
            self._signal_stop()
        super().close(why)

    def _dispatch(self, number: int) -> Dispatch:
        return _WithWakeup(number, self.wakeup)

    def _fault(self, current: Dispatch, late: Sequence[int], why: str | None) -> BaseException:
        """What was raised; if a neighbour broke a link, other ranks know why."""
        return current.failures()[0]

    def release(self) -> None:
        """Close the file descriptors, unless a pass that cannot be stopped still uses them."""
        self.join(_GRACE)
        if self.wakeup >= 0 and not any(thread.is_alive() for thread in self._threads):
            os.close(self.wakeup)
            os.close(self._stop)
            self.wakeup = self._stop = -1

    def _signal_stop(self) -> None:
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)

    def _clear(self) -> None:
        self._drained(self._stop)
        self._reset_links()

    @staticmethod
    def _drained(event: int) -> bool:
        """Whether an event had happened; now it has not."""
        if event < 0:
            return False
        try:
            return bool(os.eventfd_read(event))
        except BlockingIOError:
            return False

    # -- in the thread itself ---------------------------------------------------------------

    def begin(self, number: int, timeout: float) -> None:
        """A pass begins that was started in this operation, and may take so many seconds."""
        self.dispatch, self._timeout = number, timeout
        self._deadline = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds that the pass may still take."""
        return max(0.1, self._deadline - time.monotonic())

    def wait_for(self, wire: Wire) -> None:
        """Wait until something comes over a wire from a neighbour.

        Raises:
            Aborted: what is under way was given up.
            WorkerTimeout: nothing came in time.
        """
        if not wire.ready():
            self._await(wire.ready, "nothing came", wire.fileno())

    def wait_for_room(self, wire: Wire) -> None:
        """Wait until a neighbour has read enough for one more message.

        Raises:
            Aborted: what is under way was given up.
            WorkerTimeout: it did not read in time.
        """
        if not wire.has_room():
            self._await(wire.has_room, "a neighbour read nothing", out=wire.fileno())

    def _await(
        self, is_ready: Callable[[], bool], what: str, *fds: int, out: int | None = None
    ) -> None:
        """Wait until it is ready; see `Intake.wait`.

        Raises:
            Aborted: what is under way was given up.
            WorkerTimeout: that took too long; `what` did not happen.
        """
        with self._record.waiting():
            while not is_ready():
                timeout = min(self.left(), _SLICE)
                ready = self.intake.wait(self._stop, *fds, out=out, timeout=timeout)
                if self._stop in ready:
                    raise Aborted
                if not ready and time.monotonic() > self._deadline:
                    raise WorkerTimeout(
                        f"{what} within {self._timeout:.0f} s; this rank is {self._doing_now()}. "
                        "Give Pipeline a larger timeout= if that may take longer"
                    )


class _WithWakeup(Waking):
    """A dispatch that also makes a file descriptor readable when it is done.

    Args:
        number: of the dispatch.
        wakeup: the file descriptor.
    """

    def __init__(self, number: int, wakeup: int) -> None:
        super().__init__(number, 1)
        self._wakeup = wakeup

    def report(self, worker: int, result: JobResult) -> None:
        """Note the result, and signal the wakeup; called by the worker thread."""
        super().report(worker, result)
        os.eventfd_write(self._wakeup, 1)
