"""Where Python finds values other than tensors: attributes of modules, and of their objects."""

from __future__ import annotations

import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES

SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of plain data that cannot be changed and is compared by equality."""

INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has for its own use, and `training`."""

_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
    *(types.ModuleType, property, staticmethod, classmethod),
)
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "collections", "functools", "threading")
_MOST_BYTES = 1 << 20  # of an array that is compared
_MOST_KINDS = 4096


class _Missing(Enum):
    MISSING = "nothing"


MISSING: Final = _Missing.MISSING
"""Stands for the value of an attribute or item that does not exist."""


class Item(str):
    """The name of an item of a container, for a `Place`, among names of attributes.

    Args:
        key: the index or the key.
    """

    key: Any

    def __new__(cls, key: object) -> Item:
        made = super().__new__(cls, f"[{key!r}]")
        made.key = key
        return made


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute of a module, or of an object that one of its attributes leads to.

    Attributes:
        module: the qualified name of the module where the way to the attribute begins.
        names: the names of the attributes on this way, the last one its own:
            `("config", "temperature")`.
    """

    module: str
    names: tuple[str, ...]

    @property
    def last(self) -> str:
        """The name of the attribute itself, without the way to it."""
        return self.names[-1]

    def owner(self, model: nn.Module) -> Any:
        """The object that has the attribute; `MISSING` if the way there has gone."""
        found: Any = model
        for name in self.module.split(".") if self.module else ():
            found = _of(found, "_modules").get(name, MISSING)
            if found is MISSING:
                return found
        for name in self.names[:-1]:
            found = look(found, name)
        return found

    def find(self, model: nn.Module) -> Any:
        """The value at this place of the model now; `MISSING` if there is none."""
        owner = self.owner(model)
        return MISSING if owner is MISSING else look(owner, self.last)

    def can_be_put(self, model: nn.Module) -> bool:
        """Whether this is an attribute of an object, and not of a module or in a container."""
        return not isinstance(self.last, Item) and is_helper(self.owner(model))

    def put(self, model: nn.Module, value: object) -> None:
        """Set the attribute."""
        setattr(self.owner(model), self.last, value)

    def __str__(self) -> str:
        return ".".join((self.module, *self.names)).lstrip(".").replace(".[", "[")


def attributes_of(obj: object) -> dict[str, Any]:
    """An object's own attributes, without calling its code."""
    try:
        found: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(_MOST_KINDS)
def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """The slots in which objects of a class in Python keep attributes, those of its bases first."""
    found: list[types.MemberDescriptorType] = []
    for owner in reversed(kind.__mro__):
        own = vars(owner)
        members = [m for m in own.values() if isinstance(m, types.MemberDescriptorType)]
        declared = own.get("__slots__")
        if isinstance(declared, (tuple, list)):  # Python sorts them; their own order says more
            members.sort(key=lambda m: declared.index(m.__name__) if m.__name__ in declared else -1)
        found += members if declared is not None else []
    return tuple(found)


def is_filled(slot: types.MemberDescriptorType, obj: object) -> bool:
    """Whether an object has a value in this slot."""
    try:
        slot.__get__(obj)
    except AttributeError:
        return False
    return True


def _of(obj: object, name: str) -> Mapping[str, Any]:
    return attributes_of(obj).get(name) or {}


def look(obj: object, name: str) -> Any:
    """What Python finds as `obj.name`, as it is kept: a property itself, and not its value."""
    if isinstance(name, Item):
        return _item(obj, name.key)
    if name == "__dict__":  # the names of all
        return tuple(
            key
            for key in attributes_of(obj)
            if key not in INTERNAL and not isinstance(static(type(obj), key), cached_property)
        )
    if overrides_lookup(obj):
        return getattr(obj, name, MISSING)
    kept = static(type(obj) if not isinstance(obj, type) else obj, name)
    if isinstance(kept, types.MemberDescriptorType):
        return getattr(obj, name, MISSING)
    if isinstance(kept, property):
        return kept
    own = attributes_of(obj)
    if name in own:
        return own[name]
    if isinstance(obj, nn.Module):
        for registry in REGISTRIES:
            if name in _of(obj, registry):
                return _of(obj, registry)[name]
    return kept


def _item(held: Any, key: Any) -> Any:
    if isinstance(held, dict):
        return dict.get(held, key, MISSING)
    whole = isinstance(held, (list, tuple, deque)) and key < len(held)
    return held[key] if whole else MISSING


def items_of(value: object) -> list[tuple[Any, Any]]:
    """What a list, a tuple or a dictionary holds, with indices or keys."""
    if isinstance(value, dict):
        return list(dict.items(value))
    return list(enumerate(value)) if isinstance(value, (list, tuple, deque)) else []


def static(kind: type, name: str) -> Any:
    """What a class has under a name, without calling its descriptor."""
    for owner in type.mro(kind):
        if name in vars(owner):
            return vars(owner)[name]
    return MISSING


def overrides_lookup(obj: object) -> bool:
    """Whether an object's class has a `__getattribute__` written in Python; `False` for modules.

    One that `noting` has made does not count.
    """
    kind = type(obj)
    found = static(kind, "__getattribute__")
    found = getattr(found, "finds", found)
    return isinstance(found, types.FunctionType) and not issubclass(kind, nn.Module)


def noting(kind: type, note: Callable[[Any, str, Any], None]) -> Callable[[Any, str], Any]:
    """Return a `__getattribute__` for a class that notes all that is looked up.

    Args:
        kind: the class.
        note: called with the object, the name, and the value that was found, or `MISSING`.
    """
    finds: Callable[[Any, str], Any] = getattr(kind, "__getattribute__")  # noqa: B009 - as it is

    def get_attribute(obj: object, name: str) -> Any:
        try:
            value = finds(obj, name)
        except AttributeError:
            note(obj, name, MISSING)
            raise
        note(obj, name, value)
        return value

    get_attribute.finds = finds  # type: ignore[attr-defined]
    return get_attribute


def is_helper(value: object) -> bool:
    """Whether a value is an object of a class in Python whose attribute reads can be noted.

    Modules, tensors, functions, built-in containers and plain data are none, nor are objects of
    torch or numpy.
    """
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, type, Enum, *_FUNCTIONS, *SCALARS)):
        return False
    if isinstance(value, (list, tuple, dict, set, frozenset, deque, np.ndarray, np.generic)):
        return False
    if kind in (UserDict, UserList):
        return True
    heap = bool(kind.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE: classes that are written to
    immutable = bool(kind.__flags__ & (1 << 8))
    library = (kind.__module__ or "").partition(".")[0] in _LIBRARIES
    return (heap and not immutable and not library) or isinstance(value, types.SimpleNamespace)


class Opaque:
    """A tensor, a module, or something else that cannot be looked into; compared by identity.

    Bound methods, which are made anew at every access, are compared by equality.

    Attributes:
        value: the value itself.
        is_part: whether it is a tensor or a module.
    """

    __slots__ = ("is_part", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.is_part = isinstance(value, (torch.Tensor, nn.Module))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque):
            return NotImplemented
        if self.value is other.value:
            return True
        method = isinstance(self.value, types.MethodType)  # made anew at every access
        return method and bool(self.value == other.value)

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: object, depth: int = 8) -> Any:
    """Return what is compared of a value: equal if a forward cannot tell the values apart.

    Of a helper only the class is compared: its attributes have places of their own.

    Args:
        value: the value.
        depth: how many levels of containers are looked into; containers below are `Opaque`.
    """
    if isinstance(value, float):
        return type(value), float(value).hex()  # 0.0 is not -0.0, and no number is no number
    if isinstance(value, (*SCALARS, Enum)):
        return type(value), value
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0:
        return Opaque(value)
    if isinstance(value, dict):
        keys, items = tuple(dict.keys(value)), dict.values(value)
        found = type(value), tuple(map(_key, keys)), tuple(frozen(v, depth - 1) for v in items)
        own = attributes_of(value)  # of a class of one's own
        return (*found, frozen(own, depth - 1)) if own and own is not value else found
    if isinstance(value, (list, tuple, deque)):
        return type(value), tuple(frozen(item, depth - 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(frozen(item, depth - 1) for item in value)
    if isinstance(value, (np.ndarray, np.generic)) and value.nbytes <= _MOST_BYTES:
        return type(value), value.dtype, value.shape, value.tobytes()
    if is_helper(value):
        return "helper", type(value)
    return Opaque(value)


def _key(key: object) -> Any:
    return (type(key), key)


def parts_of(frozen_value: object) -> Iterator[Any]:
    """The tensors and modules in what `frozen` has given, each as an `Opaque`."""
    if isinstance(frozen_value, Opaque):
        if frozen_value.is_part:
            yield frozen_value
    elif isinstance(frozen_value, (tuple, frozenset)):
        for item in frozen_value:
            yield from parts_of(item)
