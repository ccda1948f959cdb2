"""The life of a worker process: it takes jobs from the driver until the driver is gone."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from types import FrameType

COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    "signal.signal(signal.SIGUSR2, signal.SIG_IGN); "
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
        dump: of a file for the stacks of this process's threads, which are written there on
            SIGUSR1, and if this process is about to die.
    """
    for fd in (control, lifeline, board, dump):
        os.set_inheritable(fd, False)
    _follow(lifeline)
    _offer_stacks(dump)
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


def _offer_stacks(dump: int) -> None:
    """Have stacks written to a file, on SIGUSR1 in Python, on SIGUSR2 without it.

    `faulthandler` reads the stacks of threads while these go on running Python, which may crash
    the process. So a thread of its own writes them, with the interpreter's lock; it is woken by the
    signal's handler in C, whatever the main thread does. The other signal is for a process in which
    no thread can run Python, as one of them hangs with the lock.
    """
    reads, writes = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writes, False)
    signal.signal(signal.SIGUSR1, partial(_wake, writes))
    signal.siginterrupt(signal.SIGUSR1, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=_write_stacks, args=(reads, dump), daemon=True).start()
    faulthandler.register(signal.SIGUSR2, file=dump)


def _wake(writes: int, *_: object) -> None:
    """Wake the thread that writes stacks, if signals wake something else, such as asyncio."""
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if before not in (-1, writes):
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    if before != writes:
        with suppress(BlockingIOError):
            os.write(writes, bytes([signal.SIGUSR1]))


def _write_stacks(reads: int, dump: int) -> None:
    while signals := os.read(reads, 64):
        if signal.SIGUSR1 in signals:
            os.write(dump, _stacks().encode(errors="replace"))


def _stacks() -> str:
    """The stacks of all threads but this one, as `faulthandler` writes them, the main one first."""
    main, own = threading.main_thread().ident, threading.get_ident()
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident != own:
            title = "Current thread" if ident == main else "Thread"
            lines = [f"{title} 0x{ident:016x} (most recent call first):"]
            at: FrameType | None = frame
            while at is not None:
                code = at.f_code
                lines.append(f'  File "{code.co_filename}", line {at.f_lineno} in {code.co_name}')
                at = at.f_back
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


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
