"""The life of a worker process: it takes jobs from the driver until the driver is gone."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading

COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from penstock.workers.processes.child import main; main(*{arguments!r})"
)
"""The program that the interpreter of a worker runs, by `-c`."""


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
    from penstock.board.memory import Board
    from penstock.links.wire import Gone, Wire
    from penstock.workers.processes.worker_state import WorkerState

    record = Board(workers, board).records[worker]
    own = WorkerState(worker, Wire(socket.socket(fileno=control)), record)
    signal.signal(signal.SIGTERM, lambda *_: setattr(own, "leaves", True))
    try:
        while True:
            own.serve()
    except Gone:
        own.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the user's modules have started does not hold it up
