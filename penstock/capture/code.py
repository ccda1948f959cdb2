"""What can be read off the code of Python functions.

A plain function is pure (it always does the same for the same arguments, and nothing else) if it
writes no attributes and no variables but its own, and uses no variables whose value may change.
What it does with its arguments is seen when it runs.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_OURS = ("torch", "penstock")  # packages whose Python is never the model's own
_TRUSTED = frozenset(
    """
    torch numpy builtins _operator math cmath operator functools _functools itertools random typing
    collections numbers enum types dataclasses copy string re statistics bisect heapq warnings
    """.split()
)
_ARRAYS = ("numpy", "random")
_WRITING = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME"}
_LASTING = frozenset(
    """
    data resize_ requires_grad_ retain_grad register_hook backward share_memory_ seed manual_seed
    __dict__ __setattr__ __getattribute__ __globals__ __code__ __closure__ __defaults__
    __builtins__ __subclasses__ __import__ frompyfunc simplefilter
    """.split()
)
"""Attributes by which a function may make unseen changes, as by those with `_BEGINNINGS`."""

_BEGINNINGS = ("set_", "enable_", "disable_", "use_", "register_")

_OPENING = frozenset(
    "globals locals vars setattr delattr exec eval open input __import__ compile breakpoint".split()
)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_the_models(names: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a Python module that may be the model's own."""
    module = names.get("__name__")
    return isinstance(module, str) and module.partition(".")[0] not in _OURS


def names_of(code: CodeType) -> tuple[str, ...]:
    """The names of the arguments that a function with this code takes."""
    variadic = bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variadic]


def uses_arrays(function: FunctionType) -> bool:
    """Whether the code of a function names numpy, or what draws random numbers in Python."""
    named = (function.__globals__.get(n) for c in _codes(function.__code__) for n in c.co_names)
    is_theirs = is_the_models(function.__globals__)
    return is_theirs and any(isinstance(m, ModuleType) and m.__name__ in _ARRAYS for m in named)


def impurity(function: FunctionType, within: frozenset[FunctionType] = frozenset()) -> str:
    """What a function may depend on, or change, besides its arguments, in words; empty if nothing.

    Args:
        function: the function.
        within: the functions that call it, whose own check is under way.
    """
    if function.__closure__:
        return "variables of another function"
    if set(vars(function)) - {"__wrapped__"}:
        return "attributes of its own"
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(map(_is_constant, defaults)):
        return "a default that can change"
    if function.__code__.co_flags & (0x20 | 0x80 | 0x200):
        return "what it is given between its results"
    within |= {function}
    for code in _codes(function.__code__):
        instructions = list(dis.get_instructions(code))
        for instruction, after in zip(instructions, [*instructions[1:], None], strict=True):
            if why := _why(instruction, after, function, within):
                return why
    return ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and classes defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _why(
    instruction: dis.Instruction,
    after: dis.Instruction | None,
    function: FunctionType,
    within: frozenset[FunctionType],
) -> str:
    if instruction.opname in _WRITING:
        return f"{instruction.argval}, which it writes"
    named = str(instruction.argval)
    lasts = named in _LASTING or named.startswith(_BEGINNINGS)
    if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and lasts:
        return f".{named}"
    if instruction.opname == "IMPORT_NAME" and not _is_trusted(instruction.argval):
        return f"the module {instruction.argval}, which it imports"
    if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
        return ""
    name = instruction.argval
    if name not in function.__globals__:
        return name if name in _OPENING or not hasattr(builtins, name) else ""
    found = function.__globals__[name]
    if isinstance(found, ModuleType) and not _is_trusted(found.__name__):
        if after is None or after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return f"the module {name}"
        name, found = f"{name}.{after.argval}", getattr(found, after.argval, None)
        return name if found is None else _why_used(name, found, within)
    return _why_used(name, found, within)


def _why_used(name: str, found: Any, within: frozenset[FunctionType]) -> str:
    """What the use of a variable of a Python module depends on; empty if it is nothing."""
    if _is_constant(found) or (isinstance(found, ModuleType) and _is_trusted(found.__name__)):
        return ""
    home = getattr(found, "__module__", None)
    if isinstance(found, FunctionType):
        return "" if found in within or _is_trusted(home) else impurity(found, within)
    if isinstance(found, np.ufunc):
        return "" if getattr(np, found.__name__, None) is found else name
    if isinstance(found, BuiltinFunctionType) and not isinstance(found.__self__, ModuleType | None):
        return name
    is_module = isinstance(found, type) and issubclass(found, nn.Module)
    is_plain = isinstance(found, type | BuiltinFunctionType) and not is_module
    return "" if is_plain and (home is None or _is_trusted(home)) else name


def _is_trusted(module: object) -> bool:
    """Whether nobody changes what a Python module holds: torch's, numpy's or Python's own."""
    return isinstance(module, str) and module.partition(".")[0] in _TRUSTED


def _is_constant(value: Any) -> bool:
    """Whether it is data that nobody can change."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


_OF_THE_OBJECT = frozenset(
    "id is_leaf grad_fn _is_view _base detach_ data_ptr WeakTensorKey".split()
)
"""Names by which code asks which object a tensor is, or whether it is a view of another one."""

_CLASSES = frozenset("bool int float str list tuple dict set type".split())
_MOST_CODES = 1 << 14


def codes_running(frame: FrameType | None, until: CodeType) -> Iterator[CodeType]:
    """The code of the model's own Python that is on the stack.

    Args:
        frame: the innermost frame.
        until: the code that has called the model; frames from there on are left out.
    """
    while frame is not None and frame.f_code is not until:
        if is_the_models(frame.f_globals):
            yield from _codes(frame.f_code)
        frame = frame.f_back


def codes_of(model: nn.Module) -> Iterator[CodeType]:
    """The code of the model's own functions.

    These are the methods of its modules' classes, functions that its modules hold as attributes,
    and functions in the Python modules that define these classes.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    theirs = [kind for kind in kinds if not _is_trusted(kind.__module__)]
    homes = {kind.__module__ for kind in theirs}
    held: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    held += [value for kind in theirs for value in vars(kind).values()]
    held += [value for home in homes for value in list(vars(sys.modules.get(home, sys)).values())]
    for value in held:
        function = getattr(value, "fget", getattr(value, "__func__", value))
        inner = inspect.unwrap(function) if isinstance(function, FunctionType) else None
        if isinstance(inner, FunctionType) and is_the_models(inner.__globals__):
            yield from _codes(inner.__code__)


_DRAWING = re.compile(
    "drop|rand|noise|gumbel|bernoulli|multinomial|normal_|uniform_|poisson|exponential_|rsample|"
    "shuffle|choice|permutation"
)
"""Parts of the names that code uses when it draws random numbers."""

_BESIDE_FORWARD = re.compile("__.*__|extra_repr|_?reset_parameters|_?init_.*")


@lru_cache(_MOST_CODES)
def may_draw(kind: type, training: bool) -> bool:
    """Whether the code of a class of modules may draw random numbers, as far as its names say so.

    Args:
        kind: the class.
        training: whether in training mode. In evaluation mode, code that names `training` is taken
            to draw nothing.
    """
    found = [
        getattr(value, "__func__", value)
        for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, value in vars(owner).items()
        if not _BESIDE_FORWARD.fullmatch(name)
    ]
    functions = [inspect.unwrap(f) for f in found if isinstance(f, FunctionType)]
    names: set[str] = set()
    for function in functions:  # functions that it may call are appended meanwhile
        named = {name for code in _codes(function.__code__) for name in code.co_names}
        names |= named
        called = (function.__globals__.get(name) for name in named)
        more = {inspect.unwrap(f) for f in called if isinstance(f, FunctionType)}
        functions += [f for f in more.difference(functions) if is_the_models(f.__globals__)]
    return any(map(_DRAWING.search, names)) and (training or "training" not in names)


_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")


def is_made_by_compile(function: object) -> bool:
    """Whether a function is what torch.compile has made of another one."""
    return isinstance(function, FunctionType) and "get_compiler_config" in vars(function)


@lru_cache(_MOST_CODES)
def calls_compiled(kind: type) -> bool:
    """Whether the forward of a class of modules may call a function that is compiled.

    Its code, or that of its methods or functions which it names, names one that torch.compile has
    made, or `flex_attention`, which compiles itself.
    """
    looked_at = [inspect.getattr_static(kind, "forward", None)]
    for found in looked_at:  # functions that it may call are appended meanwhile
        if is_made_by_compile(found):
            return True
        function = inspect.unwrap(found) if isinstance(found, FunctionType) else None
        if not isinstance(function, FunctionType) or not is_the_models(function.__globals__):
            continue
        codes = list(_codes(function.__code__))
        if any("flex_attention" in code.co_names for code in codes):
            return True
        every = [instruction for code in codes for instruction in dis.get_instructions(code)]
        named = {i.argval for i in every if i.opname in _GLOBALS}
        attributes = {i.argval for i in every if i.opname in _ATTRIBUTES}
        called = [function.__globals__.get(name) for name in named]
        called += [inspect.getattr_static(kind, name, None) for name in attributes]
        more = [getattr(one, "__func__", one) for one in called]
        functions = dict.fromkeys(one for one in more if isinstance(one, FunctionType))
        looked_at += [one for one in functions if one not in looked_at]
    return False


@lru_cache(_MOST_CODES)
def asks_which(code: CodeType) -> bool:
    """Whether code may ask which object a tensor is: by `id`, say, or by `is` with a variable."""
    if not _OF_THE_OBJECT.isdisjoint(code.co_names):
        return True
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before is not None:
            named = str(before.argval).rpartition(".")[2]
            is_class = before.opname == "LOAD_GLOBAL" and (named in _CLASSES or named[:1].isupper())
            if not is_class and before.opname != "LOAD_CONST":
                return True
        before = instruction
    return False


def hooks_nodes(code: CodeType) -> bool:
    """Whether code that reads `grad_fn` may hang hooks on nodes of autograd's graph."""
    return not {"register_hook", "register_prehook"}.isdisjoint(code.co_names)
