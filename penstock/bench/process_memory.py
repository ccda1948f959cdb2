"""Memory in a process where many contestants wait for their turn."""

from __future__ import annotations

import ctypes
import sys

from penstock.devices.allocator import keep_freed_memory

_M_ARENA_MAX = -8


def prepare(num_workers: int) -> str:
    """Make this process keep freed memory, for all contestants alike; says what it did.

    glibc gives every thread an arena of its own, as long as there are not too many, and an arena
    keeps what it has. With a dozen contestants alive the process would keep a dozen times the
    memory of a step, so their threads share as many arenas as threads ever run at a time.

    Args:
        num_workers: how many threads run at a time.
    """
    if not keep_freed_memory():
        return "the C library's own behaviour; it cannot be told to keep freed memory"
    _limit_arenas(num_workers + 1)
    return (
        "this process keeps freed memory (mallopt), for all contestants alike, "
        f"in {num_workers + 1} arenas"
    )


def _limit_arenas(count: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count)
