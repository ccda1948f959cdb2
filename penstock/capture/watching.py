"""What a call does besides giving a result: what it writes, and whether it looks at values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Notes whether an operation looks at values to see how large its result is.

    Attributes:
        reads_values: whether one did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_values = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            self.reads_values = True
        elif torch.Tag.dynamic_output_shape in func.tags:
            self.reads_values |= func is not torch.ops.aten.index.Tensor or any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
        return func(*args, **(kwargs or {}))


class Contents:
    """What a tensor held at some moment, to tell whether it has been changed in place since.

    Its version counter says so, but for the running statistics of `F.batch_norm`: these change
    without it, so tensors that need no gradient are compared with a copy as well.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = _version(tensor)
        copied = not tensor.requires_grad and tensor.layout is torch.strided
        self._copy = tensor.detach().clone() if copied else None

    def differs_from(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, the same one, holds something else now."""
        if _version(tensor) != self._version:
            return True
        return self._copy is not None and not torch.equal(self._copy, tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def changed(buffers: Sequence[tuple[str, torch.Tensor, Contents]]) -> tuple[str, ...]:
    """The buffers that were written since, and the others of their modules.

    A write that happens to leave a buffer as it was must not hide that its module writes it.
    """
    owners = {name.rpartition(".")[0] for name, b, before in buffers if before.differs_from(b)}
    return tuple(name for name, _, _ in buffers if name.rpartition(".")[0] in owners)


def compiled(model: nn.Module) -> set[str]:
    """The names of the modules that torch.compile has compiled, and of those that they are in."""
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if is_compiled(module):
            names.update(with_owners(path))
    return names


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled it, around it or in place."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def with_owners(path: str) -> Iterator[str]:
    """A module's qualified name, and those of the modules that it is in."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
