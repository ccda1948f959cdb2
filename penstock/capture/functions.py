"""Custom `autograd.Function`s, as functions that a recording can call.

What a function may do, and with what, so that the replay does the same, is checked here. One that
may do more stays within the module that applies it, which is closed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Whole(ABC):
    """What a program calls that is neither a module nor torch's: its Python runs in the replay."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and return its result."""


@dataclass(frozen=True)
class Applied(Whole):
    """The application of an `autograd.Function`; two of the same function are equal.

    Attributes:
        function: the class of the function.
    """

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function by torch's own `apply`, even if its class has another one."""
        apply: Any = vars(torch.autograd.Function)["apply"]
        return apply.__get__(None, self.function)(*args, **kwargs)


def why_not(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> str:
    """Why applying a function in the replay may do something else; empty if it does the same.

    Args:
        function: the function that is applied.
        args: the arguments that it is applied to.
    """
    if "<locals>" in function.__qualname__:
        return "which may be another one every time"
    if "backward" in _names(function.backward):
        return "whose backward runs another one"
    if "data" in {*_names(function.forward), *_names(function.backward)}:
        return "which uses .data, so that nobody sees what it writes"
    odd = next(filter(None, map(_why_not_given, args)), "")
    return odd and f"applied to {odd}"


def why_not_made(result: Any) -> str:
    """Why the result of a function may be another one in the replay; empty if it may not."""
    leaves = result if isinstance(result, tuple) else (result,)
    odd = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | None)]
    return f"which gives a {type(odd[0]).__name__} beside tensors" if odd else ""


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """What the code of a function names besides its variables."""
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def _why_not_given(leaf: Any) -> str:
    """What of an argument the Python of a function may run, or change; empty if it is nothing."""
    if isinstance(leaf, torch.Tensor | type):
        return ""
    if isinstance(leaf, tuple):
        return next(filter(None, map(_why_not_given, leaf)), "")
    if isinstance(leaf, list) and all(isinstance(each, torch.Tensor) for each in leaf):
        return ""
    if callable(leaf) or isinstance(leaf, list | dict | set):
        return f"a {type(leaf).__name__}, which its backward may use"
    return ""


def invoke(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that lowered code cannot call by name, because it cannot be imported."""
    return function(*args, **kwargs)
