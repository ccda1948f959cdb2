"""Memory of this process: how contestants share it, and what something holds of it at most."""

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
"""The environment of a process whose peak is one of what is in use: large blocks that are freed go
back to the kernel."""


class Live(TorchDispatchMode):
    """While open, notes how many bytes the results of operations hold at most at the same time.

    Args:
        beyond: tensors that were there before; views of them hold nothing more.

    Attributes:
        now: the bytes of those that are alive.
        peak: the most that these have been.
    """

    def __init__(self, beyond: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._before = {tensor.untyped_storage()._cdata for tensor in beyond}
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it gives."""
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
    """The bytes that what a function computes holds at most, beyond tensors that were there."""
    with Live(beyond) as live:
        function()
    return int(live.peak)


@dataclass(frozen=True)
class Held:
    """Bytes of memory that a process has, by the kernel's count. Its files, such as the libraries
    that it has loaded, do not count.

    Attributes:
        private: what no other process has.
        shared: the segments of shared memory that it maps, as far as it has touched them.
        part: of `shared`, with every page divided by the number of processes that have it. The
            parts of all processes add up to the shared memory, each page counted once.
    """

    private: int
    shared: int
    part: int

    @classmethod
    def by(cls, pid: int | str = "self") -> Held:
        """What the process of this number has now.

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
    """Bytes of memory that this process has; with `"VmHWM"` those that it has had at most."""
    return _bytes(Path("/proc/self/status"))[what]


def forget_peak() -> None:
    """From now on the process's peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def keep_memory(num_workers: int) -> str:
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
