"""The cores of this machine that this process may use, and a thread for one operation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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

    torch looks up a thread's number when it is first needed, and takes what any thread has set
    last. Asked before it is set, it stays what is set here.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
