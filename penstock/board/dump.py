"""The stacks of a process that cannot run Python, as when native code hangs and holds the lock.

Python's `faulthandler` writes them in a signal handler, to a file beside the boards. The signal is
one of those that are free for programs. It is sent only to a process that has made the file, and
that catches the signal and is not stopped, as Linux says.

`faulthandler` may crash a process whose threads go on running Python while it reads their stacks.
So it is for those that have not answered for seconds: then one thread has the interpreter's lock,
and no other can run.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock.board.process import STATE, fields, is_alive, started_at, where

SUFFIX = ".dump"
"""Of the file."""

_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9
_POLL = 0.02  # seconds between looks at the file


def offer_dumps(folder: Path) -> None:
    """From now on others of this user can have this process write the stacks of its threads.

    It is not offered where the signal is used already, or does not exist, or there is no such
    folder.

    Args:
        folder: of the boards.
    """
    with suppress(OSError, ValueError):
        _offer(folder, os.getpid())


@cache
def _offer(folder: Path, pid: int) -> None:
    """Once for every process: a fork has not made the file.

    Raises:
        OSError: the file cannot be made.
        ValueError: the signal cannot be used.
    """
    if not hasattr(signal, "SIGRTMIN") or _is_caught("self"):
        return
    path = _path(folder, pid, started_at())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(_SIGNAL, file=fd)
    atexit.register(_remove, path, pid)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def dumped(folder: Path, pid: int, started: int, patience: float) -> str:
    """Have a process write the stacks of all its threads, whatever it does.

    Args:
        folder: of its board.
        pid: of the process.
        started: when it started, as `started_at` says.
        patience: seconds to wait.

    Raises:
        OSError: it does not offer that, or has not written anything in time.
    """
    path = _path(folder, pid, started)
    known = fields(pid)
    runs = bool(known) and is_alive(pid, started) and known[STATE] not in "Tt"
    if not (path.exists() and runs and _is_caught(pid)):
        raise OSError(f"process {pid} does not offer its stacks")
    os.truncate(path, 0)
    os.kill(pid, _SIGNAL)
    end, size = time.monotonic() + patience, 0
    while time.monotonic() < end:
        time.sleep(_POLL)
        now = path.stat().st_size
        if now and now == size:  # it has ended
            return path.read_text(errors="replace").rstrip()
        size = now
    raise TimeoutError(f"process {pid} has not written its stacks within {patience:.1f} s")


def _path(folder: Path, pid: int, started: int) -> Path:
    """A name that is swept away with the boards of a process that was killed."""
    return folder / f"{where()}-{pid}-{started}-0{SUFFIX}"


def _is_caught(pid: int | str) -> bool:
    """Whether a process has a handler of the signal, as far as is known."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False
