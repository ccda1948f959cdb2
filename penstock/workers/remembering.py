"""What forwards have left in a worker's process, brought to the driver when its worker is to go.

A process has copies of modules and hooks. What these set themselves (a count, a cache, the state of
a generator of their own) is there only. Before workers are replaced, the driver's modules and hooks
get it, in the objects that they have already where there are such, so that the next workers start
from it.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from penstock.capture.attributes import HOOKS_OF_MODULES
from penstock.capture.equality import same_tensor
from penstock.capture.objects import GENERATORS, Objects
from penstock.capture.places import (
    INTERNAL,
    MISSING,
    SCALARS,
    attributes_of,
    frozen,
    is_helper,
    items_of,
)
from penstock.capture.preserve import put_state, state_of
from penstock.engine.batch import digest
from penstock.errors import InputError
from penstock.links.pickling import Packed, pack_apart, unpack_with

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_BASES: Any = (OrderedDict, dict, list, deque, set)


class StateKey(NamedTuple):
    """The place of something in a process: an attribute of a module, or a hook.

    Attributes:
        kind: what has it: `"module"` or `"tensor"`.
        number: the number by which both sides know this module or tensor.
        registry: the name of the registry of hooks; empty for an attribute.
        name: the name of the attribute, or the hook's position in the registry.
    """

    kind: str
    number: int
    registry: str
    name: Any


class Found(NamedTuple):
    """What is at a place now, if it has changed since it came.

    Attributes:
        value: packed; modules and shared tensors in it are referred to.
        same: whether it is the same object, with other contents.
        problem: why it cannot be brought to the driver; empty if it can.
    """

    value: Packed
    same: bool
    problem: str = ""


class ModuleMemory:
    """What the modules and hooks of a process held when they came.

    Args:
        modules: of the process, by number; more may come.
        tensors: that it shares, by number.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Mapping[int, torch.Tensor]) -> None:
        self._modules = modules
        self._tensors = tensors
        self._before: dict[StateKey, tuple[Any, Any]] = {}  # the thing, and what it held
        self._noted: tuple[int, int] = (0, 0)

    def note_new(self) -> None:
        """Note what the modules and tensors hold that have come since this was last called."""
        counts = len(self._modules), len(self._tensors)
        modules = range(self._noted[0], counts[0])
        tensors = list(self._tensors)[self._noted[1] :]
        self._noted = counts
        known = self._known()
        for key, value in self._places(modules, tensors):
            self._before[key] = value, _print_of(value, known)

    def note(self, changed: Mapping[int, Iterable[str]]) -> None:
        """Note what these attributes of modules hold, by number: the driver has set them."""
        known = self._known() if changed else {}
        for number, names in changed.items():
            own = attributes_of(self._modules[number])
            for name in names:
                key = StateKey("module", number, "", name)
                value = own.get(name, MISSING)
                self._before[key] = value, _print_of(value, known)

    def found(self) -> dict[StateKey, Found]:
        """What has changed since it came, by its place."""
        known = self._known()
        modules, tensors = range(len(self._modules)), list(self._tensors)
        now = dict.fromkeys(self._before, MISSING) | dict(self._places(modules, tensors))
        found = {}
        for key, value in now.items():
            before, held = self._before.get(key, (MISSING, _print_of(MISSING, known)))
            is_same = value is before
            if not (is_same and type(value) in SCALARS) and _print_of(value, known) != held:
                found[key] = _found(value, is_same, known)
        return found

    def _known(self) -> dict[int, int]:
        """Numbers for what the driver has as well, by id; see `Finder`."""
        tensors = {id(tensor): 2 * number for number, tensor in self._tensors.items()}
        return tensors | {id(module): 2 * k + 1 for k, module in enumerate(self._modules)}

    def _places(
        self, modules: Iterable[int], tensors: Iterable[int]
    ) -> Iterator[tuple[StateKey, Any]]:
        for number in modules:
            module = self._modules[number]
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, value in attributes_of(module).items():
                if name not in INTERNAL:
                    yield StateKey("module", number, "", name), value
            registries = zip(_HOOKS, HOOKS_OF_MODULES(vars(module)), strict=True)
            for registry, hooks in registries:
                yield from _hooks_in(StateKey("module", number, registry, 0), hooks)
        for number in tensors:
            for registry in _HOOKS_OF_TENSORS:
                hooks = getattr(self._tensors[number], registry, None)
                yield from _hooks_in(StateKey("tensor", number, registry, 0), hooks)


def _hooks_in(key: StateKey, hooks: Mapping[int, Any] | None) -> Iterator[tuple[StateKey, Any]]:
    """The user's hooks in a registry, by their places."""
    for place, hook in enumerate((hooks or {}).values()):
        if not (getattr(hook, "__module__", "") or "").startswith(("penstock.", "torch.")):
            yield key._replace(name=place), hook


def _print_of(value: object, known: Mapping[int, int]) -> Any:
    """A fingerprint of a value for comparison, which differs if anything in the value differs."""
    if isinstance(value, SCALARS) or value is MISSING:
        return frozen(value)
    try:
        data, tensors = pack_apart(value, known)
    except Exception:  # objects of the user's, which may raise anything
        return frozen(value)
    return data, digest(tensors), [tensor.requires_grad for tensor in tensors]


def _found(value: object, same: bool, known: Mapping[int, int]) -> Found:
    """What is sent to the driver of a value that has changed."""
    try:
        packed = pack_apart(value, known)
    except Exception as error:
        return Found(Packed(b"", ()), same, f"{type(error).__name__}: {error}")
    detached = [t if t.is_leaf else t.detach() for t in packed.tensors]  # no backward comes there
    return Found(packed._replace(tensors=detached), same)


# -- the driver's side --------------------------------------------------------------------------


@dataclass(frozen=True)
class Finder:
    """Finds what a process refers to.

    Args:
        modules: that it has, by number.
        tensors: that it shares, by number.
    """

    modules: Sequence[nn.Module]
    tensors: Sequence[torch.Tensor]

    def known(self, number: int) -> Any:
        """The driver's module or tensor of a number that `ModuleMemory` has given."""
        return self.modules[number // 2] if number % 2 else self.tensors[number // 2]

    def now(self, key: StateKey) -> Any:
        """The driver's own object at a place; `MISSING` if there is none."""
        if not key.registry:
            return attributes_of(self._holder(key)).get(key.name, MISSING)
        hooks = list(self._registry(key).items())
        return hooks[key.name][1] if key.name < len(hooks) else MISSING

    def put(self, key: StateKey, value: object) -> None:
        """Set what the driver has at a place; `MISSING` removes an attribute."""
        if key.registry:
            registry = self._registry(key)
            registry[list(registry)[key.name]] = value
        elif value is MISSING:
            attributes_of(self._holder(key)).pop(key.name, None)
        else:
            attributes_of(self._holder(key))[key.name] = value

    def _holder(self, key: StateKey) -> Any:
        return (self.modules if key.kind == "module" else self.tensors)[key.number]

    def _registry(self, key: StateKey) -> dict[int, Any]:
        return getattr(self._holder(key), key.registry, None) or {}


@dataclass(frozen=True)
class Change:
    """Something that is to be changed in the driver.

    Attributes:
        finder: finds what the processes that it comes from refer to.
        key: the place where it goes.
        value: the new value, in memory of this process.
        same: whether the driver's object stays, and gets the contents of `value`.
        name: of the place, in words.
    """

    finder: Finder
    key: StateKey
    value: Any
    same: bool
    name: str

    def make(self) -> None:
        """Change it, keeping the driver's own objects where possible."""
        value = self.value
        if self.same:
            known = {id(thing) for thing in (*self.finder.tensors, *self.finder.modules)}
            value = _Bringing(known).into(self.finder.now(self.key), value)
        self.finder.put(self.key, value)


def changes(
    found: Sequence[Mapping[StateKey, Found]], finder: Finder, name: Callable[[StateKey], str]
) -> list[Change]:
    """The changes to be made in the driver, from the processes at one place of all replicas.

    Args:
        found: for each replica what has changed in its process.
        finder: finds what these processes refer to.
        name: gives the name of a place, for errors.

    Raises:
        InputError: something cannot be brought here, or replicas have different things.
    """
    made = []
    for key in dict.fromkeys(key for own in found for key in own):
        every = [own.get(key) for own in found]
        first = every[0]
        if first is None or not all(map(partial(_same, first), every[1:])):
            raise InputError(
                f"the replicas' forwards have left different things in {name(key)}, in processes "
                "of their own, so there is not one for the next workers. Keep it in a buffer, or "
                'use workers="threads"'
            )
        problem = first.problem
        if not problem:
            try:
                value = _opened(first.value, finder)
                made.append(Change(finder, key, value, first.same, name(key)))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem:
            raise InputError(
                f"a forward has changed {name(key)} in a worker's process, and it cannot be "
                f"brought from there to the next workers: {problem}. Keep it in a buffer, or use "
                'workers="threads"'
            )
    return made


def make_all(made: Iterable[Change]) -> None:
    """Make all changes, in order."""
    for change in made:
        change.make()


def check_apart(made: Sequence[Sequence[Change]], modules: Sequence[Sequence[nn.Module]]) -> None:
    """Raise if processes have copies of one object that have become different.

    Args:
        made: for each place in a replica, the changes to be made.
        modules: for each place, the modules that its processes have.

    Raises:
        InputError: they have.
    """
    for place, own in enumerate(made):
        others = (m for k, every in enumerate(modules) if k != place for m in every)
        things = Objects(others).things() if own else {}
        for change in own:
            holder = nn.Module()
            vars(holder)["held"] = change.finder.now(change.key)
            if change.same and not things.keys().isdisjoint(Objects([holder]).things()):
                raise InputError(
                    f"a forward has changed what {change.name} leads to, which modules in other "
                    "worker processes have as well, and did not see. Keep it in a buffer, or use "
                    'workers="threads"'
                )


def _same(one: Found, other: Found | None) -> bool:
    if other is None or one.value.data != other.value.data:
        return False
    tensors, others = one.value.tensors, other.value.tensors
    return len(tensors) == len(others) and all(map(same_tensor, tensors, others))


def _opened(packed: Packed, finder: Finder) -> Any:
    """The value, in memory of this process: that of the report is only lent."""
    owned = [t.detach().clone().requires_grad_(t.requires_grad) for t in packed.tensors]
    return unpack_with(packed.data, lambda n: owned[n] if n >= 0 else finder.known(-1 - n))


class _Bringing:
    """Copies the contents of objects into others of the same kind, so that these stay in use.

    Args:
        known: the ids of tensors and modules that both sides have anyway.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._done: dict[int, Any] = {}

    def into(self, old: Any, new: Any) -> Any:
        """The old object, holding what the new one does; or the new one, if that cannot be."""
        if old is new or type(old) is not type(new) or isinstance(old, SCALARS):
            return new
        if id(old) in self._known or id(new) in self._known:
            return new
        if id(old) not in self._done:
            self._done[id(old)] = old
            self._done[id(old)] = self._into(old, new)
        return self._done[id(old)]

    def _into(self, old: Any, new: Any) -> Any:
        if isinstance(old, torch.Tensor):
            return self._tensor(old, new)
        if isinstance(old, GENERATORS):
            put_state(old, state_of(new))
        elif isinstance(old, np.ndarray) and _alike(old, new):
            old[...] = new
        elif isinstance(old, _BASES):
            self._container(old, new)
        elif isinstance(old, nn.Module) or (is_helper(old) and not _has_slots(type(old))):
            self._attributes(old, new)
        elif isinstance(old, types.FunctionType):
            return self._function(old, new)
        elif isinstance(old, types.MethodType):
            return old if self.into(old.__self__, new.__self__) is old.__self__ else new
        else:
            return new
        return old

    def _tensor(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        fits = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        plain = old.is_leaf and not old.is_inference() and old.is_contiguous()
        if not (fits and plain and old.requires_grad == new.requires_grad):
            return new
        with torch.no_grad():
            return old.copy_(new)

    def _container(self, old: Any, new: Any) -> None:
        base = next(base for base in _BASES if isinstance(old, base))
        if issubclass(base, dict):
            held = {k: self.into(dict.get(old, k, MISSING), v) for k, v in items_of(new)}
            base.clear(old)
            base.update(old, held)
        elif base is set:
            base.clear(old)
            base.update(old, new)
        else:
            before = [*old, *[MISSING] * len(new)]
            items = [self.into(mine, item) for mine, item in zip(before, new, strict=False)]
            base.clear(old)
            base.extend(old, items)
        if attributes_of(new):
            self._attributes(old, new)

    def _attributes(self, old: Any, new: Any) -> None:
        own, theirs = attributes_of(old), attributes_of(new)
        held = {name: self.into(own.get(name, MISSING), value) for name, value in theirs.items()}
        own.clear()
        own.update(held)

    def _function(self, old: types.FunctionType, new: types.FunctionType) -> Any:
        """The old function, with what the new one encloses; its globals are the driver's."""
        cells, others = old.__closure__ or (), new.__closure__ or ()
        if len(cells) != len(others):
            return new
        for mine, theirs in zip(cells, others, strict=True):
            if types.CellType() not in (mine, theirs):
                mine.cell_contents = self.into(mine.cell_contents, theirs.cell_contents)
        self._attributes(old, new)
        return old


def _alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.flags.writeable


def _has_slots(kind: type) -> bool:
    return any("__slots__" in vars(owner) for owner in kind.__mro__)
