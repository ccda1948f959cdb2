"""What a pass changes besides giving results, kept so that it can be put back.

A forward that is run again has to find modules as they were (`State`), and what autograd saves of
buffers as it was (`ValuesSaved`). A step that failed leaves nothing of itself
(`Backups`), nor does a forward that is only a trial (`kept`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.capture.attributes import REGISTRIES, held_tensors, memory_of
from penstock.capture.objects import Objects
from penstock.capture.preserve import (
    objects_kept,
    own_generators,
    put_state,
    same_state,
    state_of,
)
from penstock.devices.layout import alike, extent

_SMALL = 1 << 16  # bytes of a tensor that a plain object holds


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
            (module, plain_attributes(module), dict(module._buffers)) for module in modules
        ]
        self._contents = [_Content.of(buffer) for buffer in changing]
        theirs = [
            (module, attributes)
            for module, attributes, _ in self._attributes
            if not type(module).__module__.startswith("torch.nn.")  # those keep no such things
        ]
        self._objects = Objects(module for module, _ in theirs)
        small = (t for t in self._objects.tensors() if t.nbytes <= _SMALL and not t.is_inference())
        self._in_objects = [_Content.of(tensor) for tensor in small]
        own = {id(g): g for module, _ in theirs for _, g in own_generators(module)}
        generators = {**own, **self._objects.generators}.values()
        self._generators = [(generator, state_of(generator)) for generator in generators]

    def put_back(self) -> None:
        """Put buffers, attributes, objects and generators back as they were when this was made."""
        for module, attributes, buffers in self._attributes:
            own = vars(module)
            for name in own.keys() - attributes.keys() - set(REGISTRIES):
                del own[name]
            own.update(attributes)
            if not _are_same(module._buffers, buffers):  # else other replicas may be reading them
                module._buffers.clear()
                module._buffers.update(buffers)
        self._objects.put_back()
        for generator, state in self._generators:
            put_state(generator, state)
        with torch.no_grad():
            for content in self._in_objects:
                if content.may_have_changed():
                    content.put_back()
            for content in self._contents:
                content.put_back()  # what autograd saved of it is a copy


class _Content(NamedTuple):
    """What a tensor holds.

    Attributes:
        tensor: the tensor.
        memory: the same memory, which `.data` or `set_` may replace: autograd may have saved what
            is there now.
        version: of the tensor then; 0 for an inference tensor, which has none.
        elements: a copy of what was there.
    """

    tensor: torch.Tensor
    memory: torch.Tensor
    version: int
    elements: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Content:
        """What a tensor holds now."""
        elements = _distinct(tensor.detach()).clone()
        return cls(tensor, tensor.data, cls._version_of(tensor), elements)

    def may_have_changed(self) -> bool:
        """Whether it may hold something else by now."""
        return self._version_of(self.tensor) != self.version or self._has_moved()

    @staticmethod
    def _version_of(tensor: torch.Tensor) -> int:
        return 0 if tensor.is_inference() else tensor._version

    def _has_moved(self) -> bool:
        tensor, memory = self.tensor, self.memory
        if not tensor.layout is memory.layout is torch.strided:
            return True
        same = memory_of(tensor) == memory_of(memory) and tensor.dtype == memory.dtype
        places = [(t.shape, t.stride(), t.storage_offset()) for t in (tensor, memory)]
        return not same or places[0] != places[1]

    def put_back(self) -> None:
        """Let it hold that again, in the memory where it was."""
        if self._has_moved():
            self.tensor.data = self.memory
        _distinct(self.tensor.data).copy_(self.elements)


def _are_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether both have the very same entries, in the same order."""
    return list(one) == list(other) and all(value is other[name] for name, value in one.items())


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, each once: those of an expanded dimension are one and the same."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, but for what it registers."""
    return {name: value for name, value in vars(module).items() if name not in REGISTRIES}


# -- what autograd saves of what changes -------------------------------------------------------


@dataclass(slots=True)
class _Saved:
    """A tensor that autograd saves.

    Attributes:
        tensor: without its history, or a copy.
        version: of the tensor then; `None` for a copy, which nobody changes.
    """

    tensor: torch.Tensor
    version: int | None


class ValuesSaved:
    """Makes contexts in which autograd saves copies of tensors that change before the backward.

    One device that goes through the micro-batches in order has a backward right behind each
    forward. A stage runs the forwards of several before the first backward, so that what a module
    remembers has been moved on by then. Everything else is saved as ever, and it is an error as
    ever if that is changed in place.

    `batch_norm` changes statistics without increasing the version of the tensor. A copy that was
    saved before such a change is replaced by the contents that the tensor has when the forward
    ends, as on one device; or when the call of a module ends, if other threads go on with the
    tensor from there (`refresh`).

    Several threads may be inside.

    Args:
        changing: the tensors that are changed.
    """

    def __init__(self, changing: Collection[torch.Tensor]) -> None:
        self._memory: dict[int, list[tuple[int, int]]] = {}  # by storage, from byte to byte
        self._copies = _Copies()
        self._changing = changing

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around a forward."""
        if not self._changing:
            yield
            return
        memory: dict[int, list[tuple[int, int]]] = {}
        for tensor in self._changing:
            start = tensor.data_ptr()
            stop = start + extent(tensor) * tensor.itemsize
            memory.setdefault(tensor.untyped_storage()._cdata, []).append((start, stop))
        self._memory, self._copies.of = memory, []
        try:
            with saved_tensors_hooks(self._save, _load):
                yield
            self.refresh()
        finally:
            self._copies.of = []

    def refresh(self) -> None:
        """Renew the copies that this thread has saved, unless the tensor has a newer version."""
        copies, self._copies.of = self._copies.of, []
        for tensor, version, saved in copies:
            if tensor._version == version:
                saved.tensor = alike(tensor, torch.clone, sparse=True)

    def _save(self, tensor: torch.Tensor) -> _Saved:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._memory:
            start = tensor.data_ptr()
            stop = start + extent(tensor) * tensor.itemsize
            parts = self._memory[tensor.untyped_storage()._cdata]
            if any(start < end and begin < stop for begin, end in parts):
                saved = _Saved(alike(tensor, torch.clone, sparse=True), None)
                self._copies.of.append((tensor.detach(), tensor._version, saved))
                return saved
        return _Saved(tensor.detach(), tensor._version)


class _Copies(threading.local):
    """What one thread has copied: each tensor, its version then, and what holds the copy."""

    of: list[tuple[torch.Tensor, int, _Saved]]

    def __init__(self) -> None:
        self.of = []

    def __reduce__(self) -> Any:
        return _Copies, ()


def _load(saved: _Saved) -> torch.Tensor:
    tensor, version = saved.tensor, saved.version
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, is at version "
            f"{tensor._version}; expected version {version} instead"
        )
    return tensor


# -- a step that failed -----------------------------------------------------------------------


class Backup:
    """The gradients of some parameters and the contents of some buffers, as they are now.

    Gradients are copied only where some exist, that is when the user accumulates over several
    steps; after `zero_grad()` they cost nothing. Buffers are those that a forward changes:
    BatchNorm's statistics, a few kilobytes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        self._gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters
        ]
        self._buffers = [(b, b.detach().clone()) for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put gradients and buffers back as they were when the backup was made."""
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient
        for buffer, copy in self._buffers:
            buffer.copy_(copy)


class Backups:
    """What the passes that are under way may change, as it was before each of them."""

    def __init__(self) -> None:
        self._of: dict[int, list[Backup]] = {}  # by the number of the pass

    def __bool__(self) -> bool:
        """Whether any pass has begun that has neither ended nor been undone."""
        return bool(self._of)

    def begin(self, number: int, backups: Iterable[Backup] = ()) -> None:
        """A pass begins that may change what is in these backups, and in those added later."""
        self._of[number] = list(backups)

    def add(self, number: int, backup: Backup) -> None:
        """A worker begins with its part of a pass; may be called from any thread."""
        self._of[number].append(backup)

    def drop(self, number: int) -> None:
        """A pass has ended well, or has never begun."""
        self._of.pop(number, None)

    def restore(self) -> None:
        """Put back what passes have changed that did not come to their end, the oldest last."""
        for number in sorted(self._of, reverse=True):
            for backup in self._of[number]:
                backup.restore()
        self._of.clear()


# -- forwards that leave nothing behind ---------------------------------------------------------


@contextmanager
def kept(modules: Iterable[nn.Module], changing: Iterable[torch.Tensor]) -> Iterator[None]:
    """Afterwards, these modules are as they were: nothing is left of forwards that ran inside.

    What plain objects and containers among their attributes hold is put back as well, so are the
    contents of tensors there, and generators of random numbers.

    Args:
        modules: whose.
        changing: the buffers that may be changed in place.
    """
    own = _uncompiled(modules)
    every = {id(tensor): tensor for tensor in (*changing, *_attribute_tensors(own))}
    state = State(own, every.values())
    try:
        with objects_kept(own):
            yield
    finally:
        state.put_back()


def _uncompiled(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _attribute_tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The tensors that are plain attributes of modules, or in lists and the like among these."""
    for module in modules:
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                held = [value] if isinstance(value, torch.Tensor) else dict(held_tensors(value))
                tensors = held if isinstance(held, list) else held.values()
                yield from (t for t in tensors if not (t.requires_grad or t.is_meta))


class Attributes:
    """The attributes of a model's modules, but for what they register, as they are now.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._now()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._objects = Objects(_uncompiled(model.modules()), classes=True)
        self._generators = [
            (f"{path}.{name}".removeprefix("."), generator, state_of(generator))
            for path, module in model.named_modules()
            for name, generator in own_generators(module)
        ]

    def changed(self) -> list[str]:
        """The names of those that are others now, or hold something else, or were drawn from."""
        now = self._now()
        every = dict.fromkeys([*self._before, *now])
        drawn = [n for n, g, state in self._generators if not same_state(state_of(g), state)]
        others = [n for n in every if self._before.get(n) is not now.get(n)]
        roots = (self._objects.roots[key] for key in self._objects.changed())
        inside = (f"{self._paths[id(module)]}.{name}".removeprefix(".") for module, name in roots)
        return [*others, *inside, *drawn]

    def _now(self) -> dict[str, Any]:
        return {
            f"{path}.{name}".removeprefix("."): value
            for path, module in self._model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, value in vars(module).items()
            if name not in REGISTRIES
        }
