"""Running a user's model without leaving a trace on it."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES
from penstock.capture.equality import same_tensor
from penstock.capture.objects import GENERATORS, Objects
from penstock.capture.places import INTERNAL
from penstock.capture.randomness import generators_kept
from penstock.errors import CaptureError
from penstock.torch_internals import set_version

# Those whose `copy()` is known to give an equal one. A class derived from them may have a state of
# its own, or forbid changes, as the configurations of diffusers do: such are left as they are.
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, *MAPPINGS)


_MOST_KINDS = 4096
_MOST_BYTES = 4 << 30
_MOST_BYTES_IN_OBJECTS = 256 << 20


class Parameters:
    """Copies of a model's parameters, for forwards that write them (few do).

    Models of more than 4 GiB are not copied: `restore` raises if one of their parameters is
    written.

    Attributes:
        written: the names of the parameters that were written.
    """

    def __init__(self, model: nn.Module) -> None:
        self.written: set[str] = set()
        self._names = {id(p): name for name, p in model.named_parameters()}
        parameters = list(model.parameters())
        small = sum(p.nbytes for p in parameters) <= _MOST_BYTES
        self._kept = [(p, p._version, p.detach().clone() if small else None) for p in parameters]

    def compare(self) -> None:
        """Note parameters that were written without a new version, through `.data` for instance."""
        for parameter, _, copied in self._kept:
            if copied is None or copied.is_meta:
                continue
            if not same_tensor(parameter, copied):
                self.written.add(self._names[id(parameter)])

    def restore(self, thoroughly: bool = False) -> None:
        """Put back the parameters that were written since.

        Args:
            thoroughly: also those whose version does not show it, see `compare`.

        Raises:
            CaptureError: there is no copy of a parameter that was written.
        """
        if thoroughly:
            self.compare()
        for parameter, version, copied in self._kept:
            noted = thoroughly and self._names[id(parameter)] in self.written
            if parameter._version == version and not noted:
                continue
            if copied is None:
                raise CaptureError(
                    "the forward writes parameters that are too large to be restored afterwards; "
                    "load them again, and name the module that writes them in keep_closed="
                )
            self.written.add(self._names[id(parameter)])
            parameter.detach().copy_(copied)
            set_version(parameter, version)


@contextmanager
def untouched(model: nn.Module, parameters: Parameters | None = None) -> Iterator[None]:
    """While open, whatever runs leaves `model` and the random generators as they were.

    Buffers, and attributes that are tensors or plain containers, are swapped for copies meanwhile,
    so that the user's own are never written at all. Every module's attributes and training flag,
    and the generators' states, are put back, as is what plain objects hold that attributes lead to
    (`penstock.capture.objects`).

    Args:
        model: the model.
        parameters: copies of the parameters, to put these back as well; `None` to leave them.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    compiled = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
    before = [dict(module.__dict__) for module in modules]
    registries = [{name: dict(module.__dict__[name]) for name in REGISTRIES} for module in modules]
    try:
        devices = (p.device for p in model.parameters())
        with (
            objects_kept(modules, swapped=_CONTAINERS) as copies,
            _compiled_untouched(compiled),
            generators_kept(devices),
        ):
            _swap_state(modules, copies)
            yield
    finally:
        for module, attributes, contents in zip(modules, before, registries, strict=True):
            put_back(module, attributes, contents)
        if parameters is not None:
            parameters.restore()


@contextmanager
def without_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """While open, parameters start without gradients; afterwards they have their old ones again."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def buffers_kept(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Afterwards, these buffers are the same tensors as before, with the same contents.

    They are not swapped for others meanwhile, and are written only if they have changed.

    Args:
        model: the model that has them.
        names: qualified names of buffers; any other names are ignored.
    """
    before = []
    for name in names:
        path, _, own = name.rpartition(".")
        module = dict(model.named_modules()).get(path)
        if module is not None and (tensor := module._buffers.get(own)) is not None:
            before.append((module, own, tensor, tensor.detach().clone()))
    try:
        yield
    finally:
        for module, own, tensor, content in before:
            module._buffers[own] = tensor
            if same_tensor(tensor.detach(), content):
                continue
            if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
                tensor.data = content  # expanded: it has fewer elements than it shows
            else:
                tensor.detach().copy_(content)


def entries(container: Any) -> dict[Any, Any]:
    """What a list or a dictionary holds, by its place there."""
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def put_back(
    module: nn.Module, attributes: dict[str, Any], contents: dict[str, dict[Any, Any]]
) -> None:
    """Give a module back its attributes, and containers among them what they held.

    Args:
        module: the module.
        attributes: its `__dict__` as it was.
        contents: for the names of containers what they held, see `entries`.
    """
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for name, held in contents.items():
        holder = module.__dict__[name]
        holder.clear()
        if isinstance(holder, list):
            holder.extend(held.values())
        else:
            holder.update(held)


def own_generators(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes with the generators that they are, or hold in containers."""
    for name, value in vars(module).items():
        if name in INTERNAL:
            continue
        held = value.values() if type(value) is dict else value
        for one in held if type(value) in (list, tuple, dict) else (value,):
            kind: Any = type(one)
            if _is_generator(kind):
                yield name, one


@lru_cache(_MOST_KINDS)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, GENERATORS)


def state_of(generator: object) -> Any:
    """The state of a generator of torch's, Python's or numpy's; a copy, for `put_state`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _bits(generator).state


def put_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal: numbers, arrays, tensors, or such in others."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same_state(one[key], other[key]) for key in one)
    return bool(np.all(one == other))


def _bits(generator: object) -> Any:
    """What a generator of numpy's draws from."""
    bits = generator
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
    return getattr(bits, "_bit_generator", bits)


@contextmanager
def objects_kept(
    modules: Iterable[nn.Module], swapped: Collection[type] = ()
) -> Iterator[dict[int, Any]]:
    """Afterwards, generators and plain objects that modules' attributes lead to are as they were.

    Tensors that these objects hold are swapped for copies meanwhile, unless they are large.

    Args:
        modules: the modules whose attributes are followed.
        swapped: see `penstock.capture.objects.Objects`.

    Yields:
        for the ids of originals their copies; an object that is put back stands for itself there.
    """
    uncompiled = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    objects = Objects(uncompiled, swapped, classes=True)
    own = (generator for module in uncompiled for _, generator in own_generators(module))
    drawn = {id(generator): generator for generator in (*own, *objects.generators.values())}
    states = [(generator, state_of(generator)) for generator in drawn.values()]
    copies = objects.things()
    try:
        if sum(tensor.nbytes for tensor in objects.tensors()) <= _MOST_BYTES_IN_OBJECTS:
            objects.swap(lambda value: _copied(value, copies))
        yield copies
    finally:
        objects.put_back()
        for generator, state in states:
            put_state(generator, state)


@contextmanager
def _compiled_untouched(modules: list[torch.jit.ScriptModule]) -> Iterator[None]:
    """Like `untouched`, for modules of torch.jit, whose buffers are put back and not swapped."""
    flags = [module.training for module in modules]
    buffers = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    try:
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _swap_state(modules: list[nn.Module], copies: dict[int, Any]) -> None:
    for module in modules:
        for registry in (module._buffers, vars(module)):
            for name, value in registry.items():
                if name not in REGISTRIES:
                    registry[name] = _copied(value, copies)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a tensor or of a plain container, the same one for the same thing."""
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return copies.setdefault(id(value), value.detach().clone())
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        items = tuple(_copied(item, copies) for item in value)
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else copies.setdefault(id(value), items)
    if type(value) not in _CONTAINERS:
        return value
    twin = copies[id(value)] = value.copy()  # known before what is in it, which may hold it again
    if not value:  # as most dictionaries of hooks
        return twin
    for key, item in () if isinstance(value, set) else entries(value).items():
        copied = _copied(item, copies)
        if copied is not item:
            twin[key] = copied
    return twin
