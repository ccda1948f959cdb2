"""Worker processes that several tests use one after the other: most of their start is an import."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.workers import hiring
from penstock.workers.processes import ProcessWorkers


class Pooled(ProcessWorkers):
    """Workers that go back to the pool when they are dismissed in good order."""

    def close(self, why: str = "close() was called") -> None:
        if why != "close() was called":
            super().close(why)
        elif self._closed_because is None and self not in POOL:
            self._open.clear()
            POOL.append(self)

    def really_close(self) -> None:
        super().close()


POOL: list[Pooled] = []


def lend(count: int, reset: Callable[[], None]) -> ProcessWorkers:
    """Workers from the pool, or new ones."""
    for workers in POOL:
        if len(workers) == count:
            POOL.remove(workers)
            return workers
    return Pooled(count, reset)


@contextmanager
def pooled() -> Iterator[None]:
    """Meanwhile, pipelines of worker processes take them from the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hiring, "ProcessWorkers", lend)
        yield


@atexit.register
def drain() -> None:
    """Let them all go."""
    while POOL:
        POOL.pop().really_close()
