"""Whether another call of a user's function would be noticed, as far as its code shows."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from penstock.engine.reading import at_hand, codes, is_torchs

_MOST = 500  # objects that are looked at
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, range, slice)
_HARMLESS = {
    "torch",
    "math",
    "cmath",
    "operator",
    "functools",
    "itertools",
    "typing",
    "einops",
    "numpy",
}

# Whatever they are applied to, or called on, is another thing afterwards, or is outside.
_CALLS = frozenset("next print input open setattr delattr exec eval globals log".split())
_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "YIELD_VALUE"}
# These may be applied to what the function has made itself, if it has nothing else at hand.
_CHANGES = frozenset(
    """
    add append appendleft clear discard extend insert pop popitem popleft put remove reverse
    setdefault sort update write writelines
    """.split()
)


def may_have_effects(function: Any) -> bool:
    """Whether a function may do more than return something.

    It is taken to, unless its code, and that of all that it has at hand, is seen to store nothing
    outside and to change nothing but what it has made itself.
    """
    try:
        search = _Search()
        search.follow([function])
    except _FoundError:
        return True
    return bool(search.names & _CALLS) or (search.changes and search.holds)


class _FoundError(Exception):
    """There may be an effect."""


class _Search:
    """Looks at all that a function has at hand.

    Attributes:
        names: in all code.
        changes: whether some code changes something in place.
        holds: whether something is at hand that can be changed.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.changes = self.holds = False
        self._seen: dict[int, Any] = {}
        self._objects: list[Any] = []

    def follow(self, waiting: list[Any]) -> None:
        """Look at these, and at what they have at hand.

        Raises:
            _FoundError: one may have effects.
        """
        while waiting:
            found = waiting.pop()
            if id(found) not in self._seen:
                self._seen[id(found)] = found
                waiting += self._held(found)
            if not waiting:  # all names are known now
                waiting += [m for each in self._objects for m in self._methods(each)]
            if len(self._seen) > _MOST:
                raise _FoundError

    def _held(self, found: Any) -> Iterable[Any]:
        if isinstance(found, (*_PLAIN, BuiltinFunctionType)):
            return ()
        if isinstance(found, FunctionType):
            return self._of_function(found)
        if isinstance(found, nn.Module):
            return _of_module(found)
        if isinstance(found, MethodType):
            return found.__self__, found.__func__
        if isinstance(found, partial):
            return found.func, *found.args, *found.keywords.values()
        if isinstance(found, ModuleType):
            if found.__name__.partition(".")[0] not in _HARMLESS:
                self._objects.append(found)
            return ()
        if isinstance(found, (tuple, frozenset)):
            return found
        self.holds = True
        if isinstance(found, (Mapping, list, set)):
            return found.values() if isinstance(found, Mapping) else found
        if not isinstance(found, torch.Tensor) and not is_torchs(type(found).__module__):
            self._objects.append(found)
        return ()

    def _of_function(self, function: FunctionType) -> Iterable[Any]:
        if is_torchs(function.__module__):
            return ()
        for code in codes(function.__code__):
            if _stores(code):
                raise _FoundError
            self.names |= set(code.co_names)
            self.changes = self.changes or _changes(code)
        return at_hand(function, set())

    def _methods(self, found: Any) -> list[FunctionType]:
        """What an object, or a Python module, has under the names that are used."""
        is_module = isinstance(found, ModuleType)
        methods = []
        for name in self.names if is_module else {*self.names, "__call__"}:
            method = getattr(found if is_module else type(found), name, None)
            if isinstance(method, FunctionType):
                methods.append(method)
            elif callable(method) and not isinstance(method, type):
                raise _FoundError  # its code cannot be read
        return [method for method in methods if id(method) not in self._seen]


def _stores(code: CodeType) -> bool:
    """Whether it stores something outside of itself."""
    return any(
        i.opname in _STORES or (i.opname == "STORE_DEREF" and i.argval in code.co_freevars)
        for i in dis.get_instructions(code)
    )


def _changes(code: CodeType) -> bool:
    """Whether it changes something in place that it, or somebody else, has made."""
    in_place = (n for n in code.co_names if n.endswith("_") and not n.startswith("__"))
    stores = (i.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for i in dis.get_instructions(code))
    return any(in_place) or not _CHANGES.isdisjoint(code.co_names) or any(stores)


def _of_module(module: nn.Module) -> Iterable[Any]:
    """What a module has at hand.

    Raises:
        _FoundError: a call of it may leave something in it, or be heard.
    """
    constant = type(module).__module__ == "torch.nn.modules.loss"  # the weights of classes
    buffers = () if constant else module.buffers(recurse=False)
    if module._forward_hooks or module._forward_pre_hooks or any(True for _ in buffers):
        raise _FoundError
    if is_torchs(type(module).__module__):
        return module.children()
    own = [v for name, v in vars(module).items() if not name.startswith("_")]
    return [type(module).forward, *own, *module.children(), *module.parameters(recurse=False)]
