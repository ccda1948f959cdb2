"""What plain objects hold that modules keep in their attributes: counts, histories, caches.

They are the user's, so whoever runs a forward that is not the user's own puts them back.
"""

from __future__ import annotations

import array
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from penstock.capture.attributes import attributes_of_all
from penstock.capture.places import INTERNAL, attributes_of, is_filled, is_helper, slots_of

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Generators of random numbers that a module may have for itself."""

_DEPTH = 8
_MOST = 4096  # things that are looked at
_LONG = 4096  # entries of a container; those of longer ones are not looked into
_ARRAY_BYTES = 1 << 20  # the largest array that is copied
_ARRAYS = (np.ndarray, bytearray, array.array)
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type, nn.Parameter})
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "collections", "abc", "enum")

Root = tuple[nn.Module, str]
"""A module's attribute."""


class Objects:
    """The plain objects, containers and arrays that modules' attributes lead to, as they are now.

    Objects are those of classes in Python, with their `__dict__` and slots. Partial functions,
    bound methods and closures are looked into as well; modules and tensors are not.

    Args:
        modules: the modules whose attributes are followed.
        swapped: types of containers that are left out if a module itself has them; what such a
            container holds is looked at all the same.
        classes: whether attributes of the classes count, too, and defaults of their functions.

    Attributes:
        generators: the random generators that were found, by id.
        roots: for every object, container and array, by id, the attribute that led to it first.
    """

    def __init__(
        self, modules: Iterable[nn.Module], swapped: Collection[type] = (), classes: bool = False
    ) -> None:
        self._swapped = swapped
        self._classes = classes
        self._held: dict[int, _Held] = {}
        self._passed: dict[tuple[int, bool], Any] = {}
        self._kinds: set[type] = set()  # that were looked at
        self.roots: dict[int, Root] = {}
        self.generators: dict[int, Any] = {}
        for module in modules:
            for name, value in list(attributes_of(module).items()):
                if name not in INTERNAL:
                    self._look(value, (module, name), _DEPTH, outside=True)
            self._look_at_class(type(module), (module, "__class__"))

    def _look(self, value: object, root: Root, depth: int, outside: bool = False) -> None:
        """Note a thing, and what it leads to.

        Args:
            value: the thing.
            root: the attribute that leads to it.
            depth: how many steps to follow from here.
            outside: whether a module itself has it, perhaps in a container.
        """
        kind = type(value)
        full = len(self._held) + len(self._passed) >= _MOST
        if kind in _ATOMS or not depth or full or id(value) in self._held:
            return
        make = None if outside and kind in self._swapped else _kind_of(value)
        if make is not None:
            self._held[id(value)] = made = make(value)
            self.roots[id(value)] = root
            items, outside = made.items(), False
            self._look_at_class(kind, root)
        elif (id(value), outside) in self._passed:
            return
        else:
            self._passed[id(value), outside] = value
            if isinstance(value, GENERATORS):
                self.generators[id(value)] = value
            items = _parts(value)
            outside = outside and isinstance(value, (list, tuple, dict))
        for item in items if len(items) <= _LONG else ():
            self._look(item, root, depth - 1, outside)

    def _look_at_class(self, kind: type, root: Root) -> None:
        if not self._classes or kind in self._kinds:
            return
        self._kinds.add(kind)
        for owner in kind.__mro__:
            library = (owner.__module__ or "").partition(".")[0] in _LIBRARIES
            if library or id(owner) in self._held:
                continue
            self._held[id(owner)] = made = _Class(owner)
            self.roots[id(owner)] = root
            for value in made.items():
                self._look(value, root, _DEPTH)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that they hold, apart from those that require gradients or are on `meta`."""
        for held in self._held.values():
            for item in held.items():
                if isinstance(item, torch.Tensor) and not (item.requires_grad or item.is_meta):
                    yield item

    def swap(self, copied: Callable[[Any], Any]) -> None:
        """Let them hold copies of tensors until they are put back.

        Args:
            copied: gives the copy of what is to be copied, and anything else itself.
        """
        for held in self._held.values():
            held.swap(copied)

    def modules(self) -> list[nn.Module]:
        """The modules that they lead to."""
        return [thing for thing in self._passed.values() if isinstance(thing, nn.Module)]

    def things(self) -> dict[int, Any]:
        """The objects, containers and arrays themselves, by id."""
        return {key: held.thing for key, held in self._held.items()}

    def changed(self) -> dict[int, Any]:
        """Those that hold something else than when this was made, by id."""
        return {key: held.thing for key, held in self._held.items() if held.has_changed()}

    def put_back(self) -> None:
        """Let all hold what they held when this was made."""
        for held in self._held.values():
            if held.has_changed():
                held.put_back()


def uncompiled(model: nn.Module) -> list[nn.Module]:
    """A model's modules, apart from those that torch.jit compiled, which have no attributes."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def shared(model: nn.Module, changed: Objects) -> tuple[tuple[str, frozenset[str]], ...]:
    """The objects that have changed and that several modules lead to.

    Args:
        model: the model.
        changed: what its modules led to before.

    Returns:
        for each of them what it is in words, and the names of these modules.
    """
    things = changed.changed()
    users: dict[int, list[str]] = {}
    names = {id(module): path for path, module in model.named_modules()}
    for module in uncompiled(model) if things else ():
        for key in things.keys() & Objects([module], classes=True).things().keys():
            users.setdefault(key, []).append(names[id(module)])
    found = []
    for key, paths in users.items():
        name = f"{paths[0]}.{changed.roots[key][1]}".removeprefix(".")
        found += [(f"{name} ({_called(things[key])})", frozenset(paths))] if len(paths) > 1 else []
    return tuple(found)


def remembering(
    model: nn.Module, before: Mapping[str, Mapping[str, Any]], objects: Objects
) -> frozenset[str]:
    """The names of modules whose attributes have changed, or lead to an object that has.

    Args:
        model: the model.
        before: what `attributes_of_all` gave earlier.
        objects: what the model's modules led to then.
    """
    missing = object()
    found = {
        path
        for path, own in attributes_of_all(model).items()
        if own.keys() != before.get(path, {}).keys()
        or any(value is not before[path].get(name, missing) for name, value in own.items())
    }
    names = {id(module): path for path, module in model.named_modules()}
    roots = (objects.roots[key] for key in objects.changed())
    found |= {names[id(module)] for module, _ in roots if id(module) in names}
    return frozenset(found)


def _called(thing: Any) -> str:
    return f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__


class _Held:
    """An object of a class in Python, and what it held: a dictionary, slots, or both."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.own = attributes_of(thing)
        kind: Any = type(thing)
        self.slots = slots_of(kind)
        self.before = self.now()

    def now(self) -> tuple[Any, ...]:
        """Pairs of a name and a value: of its attributes, and then of its slots."""
        slots = ((s, s.__get__(self.thing)) for s in self.slots if is_filled(s, self.thing))
        return *self.own.items(), *slots

    def items(self) -> list[Any]:
        """The values that it held when this was made."""
        return [value for _, value in self.before]

    def has_changed(self) -> bool:
        """Whether names or values are others now; values are compared by identity."""
        now = self.now()
        return len(now) != len(self.before) or any(
            new is not old or not _same_name(name, known)
            for (name, new), (known, old) in zip(now, self.before, strict=True)
        )

    def put_back(self) -> None:
        """Let it hold the very values again that it held."""
        self.own.clear()
        for slot in self.slots:
            if is_filled(slot, self.thing):
                slot.__delete__(self.thing)
        for name, value in self.before:
            self.put(name, value)

    def put(self, name: Any, value: Any) -> None:
        """Bind a value to a name that the object holds, slots included."""
        if isinstance(name, types.MemberDescriptorType):
            name.__set__(self.thing, value)
        else:
            self.own[name] = value

    def swap(self, copied: Callable[[Any], Any]) -> None:
        """Replace the values that it held by copies, where `copied` makes one."""
        for name, value in self.before:
            if (twin := copied(value)) is not value:
                self.put(name, twin)


class _Class(_Held):
    """A class: its attributes, without those whose names begin with `__`.

    Of its functions, what their defaults and closures hold is looked at.
    """

    def now(self) -> tuple[Any, ...]:
        return tuple(item for item in vars(self.thing).items() if not item[0].startswith("__"))

    def items(self) -> list[Any]:
        found = []
        for value in vars(self.thing).values():
            function = getattr(value, "__func__", value)
            found += [function if isinstance(function, types.FunctionType) else value]
        return found

    def put_back(self) -> None:
        before = dict(self.before)
        for name, value in self.now():
            if name not in before:
                type.__delattr__(self.thing, name)
            elif value is not before[name]:
                type.__setattr__(self.thing, name, before[name])
        for name in before.keys() - vars(self.thing).keys():
            type.__setattr__(self.thing, name, before[name])

    def swap(self, copied: Callable[[Any], Any]) -> None:
        """Does nothing: tensors of classes are not copied."""


class _Container(_Held):
    """A list, a deque, a set or a dictionary, or of a class derived from one of these."""

    def __init__(self, thing: Any) -> None:
        bases = (OrderedDict, dict, list, deque, set)
        self.base: Any = next(base for base in bases if isinstance(thing, base))
        super().__init__(thing)

    def now(self) -> tuple[Any, ...]:
        if not issubclass(self.base, dict):
            return *((None, value) for value in self.thing), *super().now()
        items = self.base.items(self.thing)
        return *((("item", key), value) for key, value in items), *super().now()

    def has_changed(self) -> bool:
        if self.base is set:
            return bool(set(self.thing) != set(self.items()))
        return super().has_changed()

    def put_back(self) -> None:
        self.base.clear(self.thing)
        super().put_back()

    def put(self, name: Any, value: Any) -> None:
        if name is None:
            (self.base.add if self.base is set else self.base.append)(self.thing, value)
        elif isinstance(name, tuple):
            self.base.__setitem__(self.thing, name[1], value)
        else:
            super().put(name, value)

    def swap(self, copied: Callable[[Any], Any]) -> None:
        if any(copied(value) is not value for _, value in self.before):
            before = self.before
            self.before = tuple((name, copied(value)) for name, value in before)
            self.put_back()
            self.before = before


class _Array(_Held):
    """An array, or bytes that can be written."""

    def now(self) -> tuple[Any, ...]:
        array = isinstance(self.thing, bytearray)
        return ((None, bytes(self.thing) if array else self.thing.tobytes()),)

    def has_changed(self) -> bool:
        return self.now() != self.before

    def put_back(self) -> None:
        content = self.before[0][1]
        if isinstance(self.thing, np.ndarray):
            numbers = np.frombuffer(content, self.thing.dtype)
            self.thing[...] = numbers.reshape(self.thing.shape)
        elif isinstance(self.thing, bytearray):
            self.thing[:] = content
        else:
            del self.thing[:]
            self.thing.frombytes(content)

    def swap(self, copied: Callable[[Any], Any]) -> None:
        """Does nothing: an array holds no tensors."""


_KINDS: WeakKeyDictionary[type, type[_Held] | None] = WeakKeyDictionary()


def _kind_of(value: object) -> type[_Held] | None:
    """The class that puts back what a value holds; `None` if nothing that it holds can be."""
    kind = type(value)
    if kind not in _KINDS:
        if isinstance(value, (dict, list, deque, set)):
            _KINDS[kind] = _Container
        elif isinstance(value, _ARRAYS):
            _KINDS[kind] = _Array
        else:
            looked_into = is_helper(value) and not isinstance(value, (*GENERATORS, PurePath))
            _KINDS[kind] = _Held if looked_into else None
    if _KINDS[kind] is _Array and not _is_kept(value):
        return None
    return _KINDS[kind]


def _is_kept(value: Any) -> bool:
    """Whether an array is small enough, and made of numbers that can be written."""
    if isinstance(value, np.ndarray):
        plain = value.flags.writeable and not value.dtype.hasobject
        return bool(plain and value.nbytes <= _ARRAY_BYTES)
    return len(value) * getattr(value, "itemsize", 1) <= _ARRAY_BYTES


def _parts(value: object) -> list[Any]:
    """What a value leads to that is not put back itself, such as a tuple, a method or a closure."""
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = (cell for cell in value.__closure__ or ())
        held = [cell.cell_contents for cell in cells if cell != types.CellType()]
        return [*held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return []


def _same_name(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[1] is other[1]
    return bool(one is other or one == other)
