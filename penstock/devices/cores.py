"""The cores of this machine that this process may use, and the threads of one operation."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def only_cores(count: int) -> Iterator[None]:
    """Meanwhile, workers that are started get so many cores in all, if there are as many.

    A CPU worker has its share of the cores as intra-op threads, so as many workers as cores have
    one thread each, however many cores the machine has.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def use_threads(count: int) -> None:
    """Give the calling thread this many intra-op threads, for good.

    When torch first needs the number of a thread, it takes the number that any thread has set last.
    So the number is read here before it is set: then the thread keeps what is set here.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def threads_beside(busy: int) -> Iterator[None]:
    """Meanwhile, the calling thread's operations leave cores to others, but at most half of them.

    An operation is divided into equal parts, and ends with the last of them. Where one thread has
    to share its core, for example with a process that imports torch, all others wait for it.

    Args:
        busy: the cores that others keep busy.
    """
    if not busy:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2, before - busy))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flushes_denormal() -> bool:
    """Whether the calling thread takes denormal numbers for 0 (`torch.set_flush_denormal`)."""
    return math.ulp(0.0) * 1.0 == 0.0


def end_idle_threads(threads: int) -> None:
    """End the threads that wait to take part in the calling thread's next operation.

    It is called before others compute with `threads` intra-op threads each; with one each, nothing
    happens.

    An operation on a CPU is divided among threads that belong to the thread which runs it, and wait
    for its next one. They spin for a while as they wait; but if a process has more of them than
    cores, they sleep at once, all of them, and every small operation has to wake its own, which
    makes it up to ten times as slow. So whoever has others compute lets go of its own, which come
    back with its next operation. This is about GNU's OpenMP, which torch has on Linux; with another
    one nothing happens.
    """
    openmp = _gnu_openmp() if threads > 1 else None
    if openmp is not None:
        openmp.omp_pause_resource_all(_HARD)


_HARD = 2  # omp_pause_hard of OpenMP 5.0, section 3.2.44: nothing that can be made again is kept


@cache
def _gnu_openmp() -> Any:
    """torch's own copy of the library, which is loaded already; `None` if it has another one."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = {line.split()[-1] for line in lines if "libgomp" in line and "torch" in line}
    for path in sorted(found):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None
