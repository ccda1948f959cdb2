"""Whether the Python of a module is known to do nothing but call torch on what can be looked at.

A CUDA graph is recorded once, and what Python does meanwhile is not done again. Of modules that a
program calls as a whole, the bytecode of the forward is read: whatever it may read besides its
arguments, its parameters and its attributes, and whatever it may write, is named.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

_PACKAGES = ("torch", "math", "builtins", "_operator", "operator", "typing", "penstock")
PLAIN = (int, float, complex, bool, str, type(None), torch.Size, torch.dtype, torch.device)
"""Values that are compared by what they are."""

_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_FORBIDDEN = {
    *("data", "set_", "grad", "requires_grad_", "backward", "register_hook"),
    *("item", "tolist", "numpy", "cpu", "__dict__", "__class__", "autograd"),
}


def why_unknown(module: nn.Module) -> str:
    """Why the Python of a module is not known, in words; empty if it is."""
    return _Reading().module(module)


def why_unknown_function(function: Callable[..., Any]) -> str:
    """Why a function that is called with tensors is not known, in words; empty if it is."""
    return _Reading().value(function)


class _Reading:
    """Reads each function once."""

    def __init__(self) -> None:
        self._read: set[int] = set()

    def module(self, module: nn.Module) -> str:
        """Why a module, or what it calls, is not known to be pure; empty if it is."""
        kind = type(module)
        if id(module) in self._read:
            return ""
        self._read.add(id(module))
        if isinstance(module, nn.RNNBase):
            return f"{kind.__name__} moves its weights"
        if getattr(module, "sparse", False) is True:
            return f"{kind.__name__} has sparse gradients"
        if "forward" in vars(module):
            return f"a {kind.__name__} has a forward of its own"
        children = (self.module(child) for child in module.children())
        if reason := next(filter(None, children), ""):
            return reason
        if kind.__module__.startswith("torch.nn."):
            return ""
        found = self.function(kind.forward, module)
        return f"{kind.__name__} {found}" if found else ""

    def function(self, function: Any, module: nn.Module | None = None) -> str:
        """Of a function, which is a method of a module if one is given."""
        if not isinstance(function, FunctionType):
            return "is called by no plain function"
        if (id(function.__code__) in self._read) and module is None:
            return ""
        self._read.add(id(function.__code__))
        if set(function.__code__.co_freevars) - {"__class__"}:
            return "reads variables of another function"
        own = function.__code__.co_varnames[0] if module is not None else ""
        for code in _codes(function.__code__):
            reason = self._code(code, function.__globals__, own, module)
            if reason:
                return reason
        return ""

    def _code(
        self, code: CodeType, known: dict[str, Any], own: str, module: nn.Module | None
    ) -> str:
        instructions = list(dis.get_instructions(code))
        for at, instruction in enumerate(instructions):
            name, value = instruction.opname, instruction.argval
            reason = ""
            if name in _WRITES:
                reason = f"writes {value}"
            elif name.startswith("IMPORT"):
                reason = f"imports {value}"
            elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
                reason = self._global(str(value), known)
            elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and value in _FORBIDDEN:
                reason = f"uses .{value}"
            elif own and "LOAD_FAST" in name and _loads(own, name, value):
                reason = self._own(instructions[at + 1], _loads_last(own, value), module)
            if reason:
                return reason
        return ""

    def _own(self, after: dis.Instruction, is_last: bool, module: Any) -> str:
        """Of what a forward does with its module, given what comes after it is loaded."""
        if after.opname in _WRITES:
            return f"writes {after.argval}"
        if after.opname in _READS and is_last:
            return self._attribute(str(after.argval), module)
        return "passes itself on"

    def _global(self, name: str, known: dict[str, Any]) -> str:
        if name == "super":
            return "calls what its class inherits"
        if name not in known:
            return "" if hasattr(builtins, name) else f"reads {name}"
        value = known[name]
        if isinstance(value, ModuleType):
            return "" if _is_known(value.__name__) else f"uses the module {value.__name__}"
        if isinstance(value, (int, float, bool, str)) or not callable(value):
            is_type = isinstance(value, torch.dtype)
            return "" if is_type else f"reads {name}, a variable of its module"
        return self.value(value)

    def value(self, value: Any) -> str:
        """The same for what a function calls: why it is not known; empty if it is."""
        package = getattr(value, "__module__", None) or ""
        if package.startswith("torch.autograd"):
            return "computes gradients itself"
        if isinstance(value, type):
            return "" if _is_known(package) else f"makes a {value.__name__}"
        if isinstance(value, (BuiltinFunctionType, MethodDescriptorType)):
            owner = getattr(value, "__self__", None)
            is_own = isinstance(owner, type) and not _is_known(owner.__module__)
            return f"calls {value.__qualname__} of the user's" if is_own else ""
        if _is_known(package) or value in vars(math).values():
            return ""
        if not isinstance(value, FunctionType):
            return f"calls a {type(value).__name__}"
        found = self.function(value)
        return f"calls {value.__name__}, which {found}" if found else ""

    def _attribute(self, name: str, module: Any) -> str:
        """Of an attribute that a forward reads from its module."""
        if name in _FORBIDDEN:
            return f"uses .{name}"
        if name in module._parameters or name in module._buffers:
            return ""
        if name in module._modules:
            child = module._modules[name]
            return "" if child is None else self.module(child)
        if name in vars(module):
            value = vars(module)[name]
            if is_plain(value):
                return ""
            return (
                self.value(value) if callable(value) else f"reads {name}, a {type(value).__name__}"
            )
        value = getattr(type(module), name, None)
        if isinstance(value, property):
            return self.function(value.fget, module)
        if isinstance(value, FunctionType):
            return "" if _is_known(value.__module__) else self.function(value, module)
        return f"reads {name} of its class"


def is_plain(value: Any) -> bool:
    """Whether it is a value that can be compared, or a container of such."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    return isinstance(value, PLAIN)


def _is_known(package: str) -> bool:
    return package.partition(".")[0] in _PACKAGES


def _loads(own: str, name: str, value: Any) -> bool:
    """Whether an instruction loads a variable; some load two, or store one and load one."""
    if not isinstance(value, tuple):
        return bool(value == own)
    return own in (value[1:] if name.startswith("STORE") else value)


def _loads_last(own: str, value: Any) -> bool:
    """Whether what comes next is about it."""
    return bool((value[-1] if isinstance(value, tuple) else value) == own)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
