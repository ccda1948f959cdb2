"""What torch.profiler sees of passes, written beside their timelines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from penstock.errors import InputError
from penstock.files import save_whole
from penstock.torch_internals import is_profiling, profiler_config


@contextmanager
def profiled(path: str | os.PathLike[str]) -> Iterator[None]:
    """While open, torch.profiler looks on; then its Chrome trace is written, unless it has failed.

    It sees all threads of this process, among them those that run stages.

    Args:
        path: of the file, usually `step.json`; compressed if it ends in `.gz`.

    Raises:
        InputError: a profiler is running already, or the file cannot be written.
    """
    if is_profiling():
        raise InputError(
            "torch.profiler is running already, and there can be one at a time: leave out "
            "profile=, or end the other one before"
        )
    threads = profiler_config(all_threads=True)  # by default it sees the caller's alone
    # One cycle has all events; torch 2.12 warns of others unless they are to be accumulated.
    with profile(experimental_config=threads, acc_events=True) as found:
        yield
    with tempfile.TemporaryDirectory() as folder:  # as it only logs that it cannot write
        scratch = Path(folder) / Path(path).name
        found.export_chrome_trace(str(scratch))
        save_whole(path, scratch.read_bytes(), "trace")


def of_worker(path: str | os.PathLike[str], worker: int) -> Path:
    """The trace file of a worker process: `step-worker-1.json` for `step.json`.

    Args:
        path: the path that the user gave for the whole pipeline.
        worker: the worker's number.
    """
    stem, dot, rest = Path(path).name.partition(".")
    return Path(path).with_name(f"{stem}-worker-{worker}{dot}{rest}")
