"""The user's loss and metrics, as far as their code shows without running them.

Whether they can be called as they will be, what they read besides their arguments, and whether
another call of them would be noticed.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError

_MOST_READ = 2000  # objects in the search for what a function reads
_MOST_FOLLOWED = 500  # objects in the search for effects; a function with more may have some
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


# -- how they can be called ------------------------------------------------------------------


def callable_as(
    what: str, function: object, has_target: bool, more: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function, if it can be called so.

    Args:
        what: the argument that it was, `"loss_fn"`.
        function: the user's.
        has_target: whether it will get one after the output.
        more: keyword arguments that it will get.

    Raises:
        InputError: it is no function, or takes other arguments.
    """
    if isinstance(function, type):
        name = function.__name__
        raise InputError(f"{what}={name} is a class; give an object of it: {what}={name}()")
    if not callable(function):
        raise InputError(
            f"{what}={function!r} is not a function of (output, target); one is needed where the "
            "last stage is, torch.nn.functional.cross_entropy for instance"
        )
    count = 1 + has_target
    forward = function.forward if isinstance(function, nn.Module) else function
    if (not more and _surely_takes(forward, count)) or not (why := _cannot(forward, count, more)):
        taken: Callable[..., Any] = function
        return taken
    called = ", ".join(["output", *["target"] * has_target, *(f"{name}=..." for name in more)])
    hint = ""
    if not has_target and not _cannot(forward, 2, more):
        hint = ", as no target= was given; give target=y"
    name = getattr(function, "__name__", type(function).__name__)
    raise InputError(f"{what}={name} is called as {name}({called}){hint}; {why}")


def _surely_takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it takes so many arguments, if that is easily seen; called at every step."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_kwonlyargcount:
        return False
    most = code.co_argcount - (getattr(function, "__self__", None) is not None)
    return bool(most - len(getattr(function, "__defaults__", None) or ()) <= count <= most)


def _cannot(function: Callable[..., Any], count: int, more: Mapping[str, Any]) -> str:
    """Why it cannot be called with so many arguments and these; nothing if it can, or may."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*[None] * count, **more)
    except TypeError as error:
        return str(error)
    return ""


# -- what they read --------------------------------------------------------------------------

# It matters where a forward leaves a tensor in an attribute of its module (the balance loss of a
# mixture of experts, say) for the loss to find, or changes a buffer. With several stages the module
# is micro-batches ahead of the loss, or in another process, so the loss would find that of another,
# or none.


@dataclass(frozen=True)
class LeftAttributes:
    """What the forward of a model leaves in attributes, out of the loss's reach.

    Attributes:
        model: whose.
        attributes: for each the path of its module, and its name there.
    """

    model: nn.Module
    attributes: Sequence[tuple[str, str]]


def check_reads(what: str, function: object, left: LeftAttributes) -> None:
    """Raise if a function reads an attribute that may hold the value of another micro-batch.

    Args:
        what: what the function is, in words.
        function: the user's.
        left: the attributes that forwards leave.

    Raises:
        InputError: it does, by all appearances.
    """
    if not left.attributes or function is None:
        return
    modules, names = _reads_of(function, left.model)
    for path, name in left.attributes:
        if id(left.model.get_submodule(path)) in modules and name in names:
            raise InputError(
                f"the {what} reads {name!r} of the module {path or '(the whole model)'!r}, which "
                "its forward sets. That module runs in another stage or process, ahead of the "
                f"{what}, so it would be that of another micro-batch, without gradients. Return "
                "it from the model's forward as a part of the output: loss_fn=lambda output, "
                f"target: criterion(output[0], target) + output[1], with {name!r} as output[1]. "
                "If that is not what is read, give a function that does not have the model at hand"
            )


def _reads_of(function: object, model: nn.Module) -> tuple[set[int], set[str]]:
    """The modules of a model that a function has at hand, by id, and the names in its code.

    Functions that it calls are looked into, if they are at hand, and methods of these modules.
    """
    of_model = {id(module) for module in model.modules()}
    modules: dict[int, nn.Module] = {}
    names: set[str] = set()
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting and len(seen) < _MOST_READ:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, nn.Module) and id(found) in of_model:
            modules.update({id(module): module for module in found.modules()})
        else:
            waiting += _held(found, names)
        if not waiting:
            waiting += _methods(modules.values(), names)
    return set(modules), names


def _held(found: object, names: set[str]) -> Iterable[Any]:
    """What an object has at hand; the names in its code are added to `names`."""
    if isinstance(found, partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, FunctionType):
        return _at_hand(found, names)
    if isinstance(found, Mapping):
        return list(found.values())
    if isinstance(found, (list, tuple, set)):
        return list(found)
    if isinstance(found, (torch.Tensor, type)) or _is_torchs(type(found).__module__):
        return []
    call = getattr(type(found), "forward" if isinstance(found, nn.Module) else "__call__", None)
    return [call, *getattr(found, "__dict__", {}).values()]


def _at_hand(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """What a function has at hand: globals, defaults, what it encloses; names are added."""
    if _is_torchs(function.__module__):
        return
    own = {name for code in _codes(function.__code__) for name in code.co_names}
    names |= own
    yield from (function.__globals__[name] for name in own if name in function.__globals__)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def _is_torchs(module: str | None) -> bool:
    """Whether a module of this name is PyTorch's, or Python's own."""
    return (module or "").partition(".")[0] in ("torch", "builtins")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _methods(modules: Iterable[nn.Module], names: Collection[str]) -> Iterator[FunctionType]:
    """Those of the modules' classes that have one of these names."""
    for kind in {type(module) for module in modules}:
        for name in names:
            method = getattr(kind, name, None)
            if isinstance(method, FunctionType) and not _is_torchs(method.__module__):
                yield method


# -- whether another call would be noticed ----------------------------------------------------


def may_have_effects(function: object) -> bool:
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
    """Ends the search: a call of the function may have an effect."""


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
            if len(self._seen) > _MOST_FOLLOWED:
                raise _FoundError

    def _held(self, found: object) -> Iterable[Any]:
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
        if not isinstance(found, torch.Tensor) and not _is_torchs(type(found).__module__):
            self._objects.append(found)
        return ()

    def _of_function(self, function: FunctionType) -> Iterable[Any]:
        if _is_torchs(function.__module__):
            return ()
        for code in _codes(function.__code__):
            if _stores(code):
                raise _FoundError
            self.names |= set(code.co_names)
            self.changes = self.changes or _changes(code)
        return _at_hand(function, set())

    def _methods(self, found: object) -> list[FunctionType]:
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
    stores = (
        i.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
        for i in dis.get_instructions(code)
    )
    return any(in_place) or not _CHANGES.isdisjoint(code.co_names) or any(stores)


def _of_module(module: nn.Module) -> Iterable[Any]:
    """What a module has at hand.

    Raises:
        _FoundError: a call of it may leave something in it, or be noticed.
    """
    constant = type(module).__module__ == "torch.nn.modules.loss"  # the weights of classes
    buffers = () if constant else module.buffers(recurse=False)
    if module._forward_hooks or module._forward_pre_hooks or any(True for _ in buffers):
        raise _FoundError
    if _is_torchs(type(module).__module__):
        return module.children()
    own = [v for name, v in vars(module).items() if not name.startswith("_")]
    return [type(module).forward, *own, *module.children(), *module.parameters(recurse=False)]
