"""The life of a worker process: it takes jobs from the driver until the driver is gone."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.workers.processes.worker_state import WorkerState

JOB, ABORT, GRANT = range(3)
"""What the driver sends: work; that a dispatch is given up; a file descriptor for later jobs."""

VALUE, ERROR = range(2)
"""What a worker sends: what its job returned, or raised."""

COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from penstock.workers.processes.child import main; main(*{arguments!r})"
)
"""What the interpreter of a worker is told to run."""


def main(worker: int, workers: int, control: int, lifeline: int, board: int, dump: int) -> None:
    """Serve the driver, until it closes the socket.

    Args:
        worker: the number of this one.
        workers: how many there are.
        control: the file descriptor of the socket to the driver.
        lifeline: of a pipe that closes when the driver is gone.
        board: of the memory where every worker says what it is doing.
        dump: of a file for the stack, which is written there on SIGUSR1, and if this process is
            about to die.
    """
    for fd in (control, lifeline, board, dump):
        os.set_inheritable(fd, False)
    _follow(lifeline)
    faulthandler.register(signal.SIGUSR1, file=dump)
    faulthandler.enable(file=dump)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        _live(worker, workers, control, board)
    except BaseException:
        import traceback

        os.ftruncate(dump, 0)
        os.lseek(dump, 0, os.SEEK_SET)
        os.write(dump, traceback.format_exc().encode())
        os._exit(1)


def _follow(lifeline: int) -> None:
    """See to it that this process ends when the driver has ended, however busy it is."""
    if hasattr(fcntl, "F_SETSIG"):  # the kernel does it, also if this process is stopped
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()


def _wait_for_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _live(worker: int, workers: int, control: int, board: int) -> None:
    from penstock.links.segment import Segment
    from penstock.links.wire import Gone, Wire
    from penstock.workers.processes.worker_state import WorkerState

    position = Segment(8 * workers, board).integers()[worker : worker + 1]
    own = WorkerState(worker, Wire(socket.socket(fileno=control)), position)
    try:
        while True:
            _serve(own)
    except Gone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the user's modules have started does not hold it up


def _serve(own: WorkerState) -> None:
    """Do the next job, and report."""
    from penstock.links.wire import Gone

    job = own.next_job()
    own.position[0] = position = getattr(job, "position", 0)
    try:
        value, kind = job(own), VALUE
    except BaseException as error:
        value, kind = portable(_named(error, own.worker, position)), ERROR
        del error
    del job
    own.position[0] = 0
    try:
        own.report(kind, value)
    except Gone:
        raise
    except Exception as error:  # what cannot be pickled has not been sent in part
        own.report(ERROR, portable(_unsent(error, own.worker)))


def _named(error: BaseException, worker: int, position: int) -> BaseException:
    """The error that says which worker failed, and in what."""
    from penstock.errors import PenstockError, WorkerError
    from penstock.links.local import Aborted
    from penstock.workers.assembly import decode

    if not position or isinstance(error, PenstockError | Aborted):
        return error
    named = WorkerError(*decode(position), error, worker)
    named.__traceback__ = error.__traceback__
    return named


def _unsent(error: Exception, worker: int) -> BaseException:
    from penstock.errors import InputError

    found = InputError(
        f"the result of worker {worker} cannot be sent to the driver's process: "
        f'{type(error).__name__}: {error}. Use workers="threads"'
    )
    found.__cause__ = error
    return found


def portable(error: BaseException, where: str = "the worker's process") -> BaseException:
    """The exception, so that it can be pickled; its traceback is a note."""
    import traceback

    from penstock.errors import WorkerError
    from penstock.links.local import Aborted

    if isinstance(error, Aborted):
        return Aborted(*error.args)
    text = "".join(traceback.format_exception(error.__cause__ or error)).rstrip()
    found = _pickled(error)
    if found is None and isinstance(error, WorkerError):
        stand_in = _stand_in(error.__cause__ or error)
        found = WorkerError(error.stage, error.microbatch, error.action, stand_in, error.worker)
    found = found or _stand_in(error)
    if "\n" in text:  # it has a traceback
        found.add_note(f"In {where}:\n{text}")
    return found


def _pickled(error: BaseException) -> Any:
    """The exception as it arrives elsewhere; `None` if it does not."""
    from penstock.links.pickling import pack, unpack

    try:
        found = unpack(*pack(error))
    except Exception:
        return None
    return found if isinstance(found, type(error)) else None


def _stand_in(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")
