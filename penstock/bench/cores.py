"""The cores of this machine, and pipelines that get only some of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
