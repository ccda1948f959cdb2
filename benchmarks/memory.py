"""What something holds in memory at most: bytes of tensors that live, and of the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

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
        for leaf in tree_iter(result):
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
    return live.peak


def resident(what: str = "VmRSS") -> int:
    """Bytes of memory that this process has; with `"VmHWM"` those that it has had at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


def forget_peak() -> None:
    """From now on the process's peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
