"""Worker processes that several tests use one after the other: most of their start is an import.

A test that uses the pool does not test how processes end: `close()` gives them back. That they
really do end, and leave nothing, is tested in tests/workers/processes/test_process_workers.py
(`fresh`), tests/support/test_pool.py (`test_without_the_pool_closing_really_closes`), and
tests/faults, none of whose pipelines take theirs from here.

Workers are lent again only if they are as new: their states hold nothing of an earlier pipeline, no
more files and threads are open than at the beginning, and torch's settings and generators are
those of a new process. Others are really closed, and so are those that have been lent often: the
memory that they have shared, and the sockets to other workers, are theirs as long as they live.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import BY_USER
from penstock.workers.processes import backend
from penstock.workers.processes.pool import ProcessPool, ProcessSurvivors
from penstock.workers.processes.worker_state import WorkerState

_LOANS = 40  # of the same workers
_PATIENCE = 60.0  # seconds that a worker may take to import torch, or to empty itself


@dataclass(frozen=True)
class State:
    """What a worker's process is like between two pipelines.

    Attributes:
        held: names of what its `WorkerState` has.
        files: that are open, apart from shared memory and sockets.
        threads: of Python.
        settings: of torch.
        working_directory: of the process.
    """

    held: tuple[str, ...]
    files: int
    threads: int
    settings: tuple[object, ...]
    working_directory: str


@dataclass(frozen=True)
class Renewed:
    """A job: put everything back, and tell what is left."""

    threads: int = 1
    directory: str = ""

    def __call__(self, own: WorkerState) -> State:
        own.empty()
        gc.collect()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        if self.directory:
            os.chdir(self.directory)
        held = {"assemblies", "tensors", "links", "slots", "modules", "optimizers"}
        return State(
            tuple(sorted(name for name in held if getattr(own, name))),
            sum(not name.startswith(("socket:", "/memfd:")) for name in open_files()),
            threading.active_count(),
            (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
            os.getcwd(),
        )


def open_files() -> Iterator[str]:
    """What the file descriptors of this process stand for."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is the one that lists the folder
            yield os.readlink(path)


class Pooled(ProcessPool):
    """Workers that go back to the pool when they are dismissed in good order."""

    def __init__(self, count: int, reset: Callable[[], None]) -> None:
        self._new: list[State] = []
        self._loans = 1
        super().__init__(count, reset)

    def close(self, why: str = BY_USER) -> None:
        if why != BY_USER:
            super().close(why)
        elif self._closed_because is None and self not in POOL:
            self._open.clear()
            POOL.append(self)

    def really_close(self) -> None:
        super().close()

    def note(self) -> None:
        """Wait for them, and note what they are like."""
        self._new = self.run([Renewed()] * len(self), _PATIENCE)

    def renew(self) -> bool:
        """Make them as new; whether that is so."""
        self._loans += 1
        if self._loans > _LOANS:
            return False
        try:
            jobs = [Renewed(directory=state.working_directory) for state in self._new]
            return self.run(jobs, _PATIENCE) == self._new
        except Exception:  # they have ended, or do not listen
            return False


POOL: list[Pooled] = []


def lend(
    count: int,
    reset: Callable[[], None],
    survivors: ProcessSurvivors | None = None,
    keeps_survivors: bool = False,
    spares: int = 0,
    **leave: float,
) -> ProcessPool:
    """Workers from the pool, or new ones.

    Those that survive others are never of the pool, nor are those on GPUs, which have time to
    `leave`.
    """
    if survivors is not None or keeps_survivors or leave:
        return ProcessPool(count, reset, survivors, keeps_survivors, spares, **leave)
    for workers in [each for each in POOL if len(each) == count]:
        POOL.remove(workers)
        if workers.renew():
            workers._reset = reset
            return workers
        workers.really_close()
    found = Pooled(count, reset)
    found.note()
    return found


@contextmanager
def pooled(again: bool = True) -> Iterator[None]:
    """Meanwhile, pipelines of worker processes take them from the pool.

    Args:
        again: whether they give them back; else the workers really go.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "ProcessPool", lend)
        if not again:
            patch.setattr(Pooled, "close", ProcessPool.close)
        yield


@atexit.register
def drain() -> None:
    """Let them all go."""
    while POOL:
        POOL.pop().really_close()
