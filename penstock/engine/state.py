"""What modules remember from one forward to the next, so that a forward can be run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.capture.objects import Objects
from penstock.capture.preserve import own_generators, put_state, state_of

_SMALL = 1 << 16  # bytes of a tensor that a plain object holds
_REGISTRIES = ("_parameters", "_modules", "_buffers")


class State:
    """The buffers and attributes of some modules, as they are now.

    A forward may change a buffer in place, as BatchNorm does, or assign another one, or count its
    calls in an attribute, or in a list or a plain object there, or draw from a generator of its
    own. What else attributes refer to is not copied, apart from `changing`.

    Args:
        modules: whose; each once.
        changing: the buffers that are changed in place.
    """

    def __init__(self, modules: Iterable[nn.Module], changing: Iterable[torch.Tensor]) -> None:
        self._attributes = [
            (module, _attributes(module), dict(module._buffers)) for module in modules
        ]
        self._contents = [(buffer, _distinct(buffer.detach()).clone()) for buffer in changing]
        theirs = [
            (module, attributes)
            for module, attributes, _ in self._attributes
            if not type(module).__module__.startswith("torch.nn.")  # those keep no such things
        ]
        self._objects = Objects(module for module, _ in theirs)
        small = (t for t in self._objects.tensors() if t.nbytes <= _SMALL and not t.is_inference())
        self._in_objects = [(t, t._version, _distinct(t.detach()).clone()) for t in small]
        own = {id(g): g for module, _ in theirs for _, g in own_generators(module)}
        generators = {**own, **self._objects.generators}.values()
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def put_back(self) -> None:
        """Make the modules as they were."""
        for module, attributes, buffers in self._attributes:
            own = vars(module)
            for name in own.keys() - attributes.keys() - set(_REGISTRIES):
                del own[name]
            own.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        self._objects.put_back()
        for generator, state in self._generators:
            put_state(generator, state)
        with torch.no_grad():
            for tensor, version, content in self._in_objects:
                if tensor._version != version:
                    _distinct(tensor.data).copy_(content)
            for buffer, content in self._contents:
                _distinct(buffer.data).copy_(content)  # what autograd saved of it is a copy


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, each once: those of an expanded dimension are one and the same."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}


# -- what autograd saves of what changes -------------------------------------------------------

_ALIGNMENT = 64  # bytes; kernels may choose their way by it


class _Saved(NamedTuple):
    """A tensor that autograd saves.

    Attributes:
        tensor: without its history, or a copy.
        version: of the tensor then; `None` for a copy, which nobody changes.
    """

    tensor: torch.Tensor
    version: int | None


def values_saved(changing: Collection[torch.Tensor]) -> AbstractContextManager[Any]:
    """Inside, what autograd saves of these tensors is copied: they are changed before a backward.

    One device that goes through the micro-batches in order has a backward right behind each
    forward. A stage runs the forwards of several before the first backward, so that what a module
    remembers has been moved on by then. Everything else is saved as ever, and it is an error as
    ever if that is changed in place.
    """
    if not changing:
        return nullcontext()
    memory: dict[int, list[tuple[int, int]]] = {}  # by storage, from which byte to which
    for tensor in changing:
        start = tensor.data_ptr()
        stop = start + _extent(tensor) * tensor.itemsize
        memory.setdefault(tensor.untyped_storage()._cdata, []).append((start, stop))

    def save(tensor: torch.Tensor) -> _Saved:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory:
            start = tensor.data_ptr()
            stop = start + _extent(tensor) * tensor.itemsize
            parts = memory[tensor.untyped_storage()._cdata]
            if any(start < end and begin < stop for begin, end in parts):
                return _Saved(_copied(tensor.detach()), None)
        return _Saved(tensor.detach(), tensor._version)

    return saved_tensors_hooks(save, _load)


def _load(saved: _Saved) -> torch.Tensor:
    tensor, version = saved
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, is at version "
            f"{tensor._version}; expected version {version} instead"
        )
    return tensor


def _extent(tensor: torch.Tensor) -> int:
    """The elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and alignment, so that kernels compute the same bits with it."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor.clone()
    before = tensor.data_ptr() % _ALIGNMENT // tensor.itemsize
    before = min(before, int(tensor.storage_offset()))
    flat = (before + _extent(tensor),), (1,), tensor.storage_offset() - before
    return tensor.as_strided(*flat).clone().as_strided(tensor.shape, tensor.stride(), before)
