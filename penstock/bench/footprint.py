"""The memory of processes: what they have, their peak, and how they keep freed memory."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.devices.allocator import keep_freed_memory
from penstock.torch_internals import TorchDispatchMode, pytree

_M_ARENA_MAX = -8

SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Environment variables of a process whose peak memory is measured. Freed blocks of 64 KiB or more
go back to the kernel, so that the peak is that of the memory in use."""


class Live(TorchDispatchMode):
    """While open, counts the bytes that results of operations hold, and the peak of these.

    Args:
        beyond: tensors that exist before; they and their views are not counted.

    Attributes:
        now: the bytes of the results that are alive.
        peak: the largest value that `now` has had.
    """

    def __init__(self, beyond: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._before = {tensor.untyped_storage()._cdata for tensor in beyond}
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the memory of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or key in self._before or storage.device.type == "meta":
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak(function: Callable[[], Any], beyond: Iterable[torch.Tensor] = ()) -> int:
    """The peak bytes of the tensors that a function computes.

    Args:
        function: what is run, once.
        beyond: tensors that exist before; they and their views are not counted.
    """
    with Live(beyond) as live:
        function()
    return int(live.peak)


@dataclass(frozen=True)
class Held:
    """The memory of a process in bytes, as the kernel counts it.

    Files that it has mapped, such as libraries, do not count.

    Attributes:
        private: its anonymous memory, which is not shared memory.
        shared: the segments of shared memory that it maps, as far as it has touched them.
        part: of `shared`, with every page divided by the number of processes that have it. The
            parts of all processes add up to the shared memory, each page counted once.
    """

    private: int
    shared: int
    part: int

    @classmethod
    def by(cls, pid: int | str = "self") -> Held:
        """Read the present memory of a process.

        Args:
            pid: its process id; this process by default.

        Raises:
            OSError: there is no such process, or this system has no such files.
        """
        status, rollup = (_bytes(Path(f"/proc/{pid}/{n}")) for n in ("status", "smaps_rollup"))
        return cls(status["RssAnon"], status["RssShmem"], rollup["Pss_Shmem"])


def _bytes(path: Path) -> dict[str, int]:
    """The lines `name: number kB` of one of the kernel's files."""
    words = (line.split() for line in path.read_text().splitlines())
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}


def resident(what: str = "VmRSS") -> int:
    """The resident memory of this process in bytes; with `"VmHWM"` its peak."""
    return _bytes(Path("/proc/self/status"))[what]


def forget_peak() -> None:
    """Reset the peak of this process's resident memory to what it has now."""
    Path("/proc/self/clear_refs").write_text("5")


def keep_memory(num_workers: int) -> str:
    """Make this process keep freed memory, for all contestants alike; returns a description.

    glibc gives every thread an arena of its own, as long as there are not too many, and an arena
    keeps what it has. With a dozen contestants alive the process would keep a dozen times the
    memory of a step, so their threads share as many arenas as threads ever run at a time.

    Args:
        num_workers: how many threads run at a time.
    """
    if not keep_freed_memory():
        return "the C library's own behaviour; it cannot be told to keep freed memory"
    limit_arenas(num_workers + 1)
    return (
        "this process keeps freed memory (mallopt), for all contestants alike, "
        f"in {num_workers + 1} arenas"
    )


def limit_arenas(count: int) -> None:
    """Make the threads that this process starts from now on share so many arenas of glibc."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count)
