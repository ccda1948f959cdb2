"""Plain functions that a program calls whole, as it calls closed modules.

A helper that makes a mask of lengths may read values (`int(lengths.max())`), but what it takes and
gives is tensors. Then it is closed, and not the module whose forward calls it. It is found on the
stack when it does what cannot be recorded. From then on a stand-in has its place in the Python
modules that have it, while a forward is recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from penstock.capture.applying import RECORDING
from penstock.capture.calls import Call, Unrecordable
from penstock.capture.functions import Whole
from penstock.capture.trees import tree_leaves

_MOST_FUNCTIONS = 256
_NOT_THE_MODELS = ("torch", "penstock")  # packages whose functions are seen into
_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class ClosedFunction(Whole):
    """What calls a plain function; equal for the same one.

    Attributes:
        function: that is called.
    """

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self.function(*args, **kwargs)


class Unclosable(Unrecordable):
    """A closed function does what only an open one may.

    Attributes:
        function: the function.
    """

    def __init__(self, path: str, function: Callable[..., Any], why: str) -> None:
        super().__init__(path, f"it calls {function.__name__}() {why}")
        self.function = function


class ClosedFunctions:
    """Which plain functions are closed."""

    def __init__(self) -> None:
        self._closed: dict[Callable[..., Any], str] = {}
        self._never: set[Callable[..., Any]] = set()

    def close(self, function: Callable[..., Any], why: str) -> None:
        """Close a function from now on, for this reason."""
        self._closed[function] = why

    def reopen(self, function: Callable[..., Any]) -> None:
        """Open one for good."""
        self._closed.pop(function, None)
        self._never.add(function)

    def reasons(self, calls: Iterable[Call]) -> dict[str, str]:
        """Why those that are called are closed, by name with that of their Python module.

        Args:
            calls: of all recordings.
        """
        called = [c.target.function for c in calls if isinstance(c.target, ClosedFunction)]
        return {f"{f.__module__}.{f.__name__}()": self._closed[f] for f in dict.fromkeys(called)}

    def running(
        self, frame: FrameType | None, until: Container[CodeType]
    ) -> Callable[..., Any] | None:
        """The innermost function that runs and may be closed; `None` if there is none.

        Args:
            frame: of the call that cannot be recorded.
            until: the code of what calls modules, one of which that Python is.
        """
        while frame is not None and frame.f_code not in until:
            function = _function_of(frame)
            if function is not None and function not in self._never:
                is_closed = function in self._closed  # and called by another name
                return None if is_closed else function
            frame = frame.f_back
        return None

    def places(self) -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
        """Where Python modules have them: the module, the name, and what stands there."""
        for function in self._closed:
            for module, name in _places_of(function, len(sys.modules)):
                if vars(module).get(name) is function:
                    yield module, name, _stand_in(function)


class _StandIn:
    """What stands in the place of a closed function while a forward is recorded.

    The model's Python may keep it, so it asks which recording runs in this thread, and without one
    it is the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = RECORDING.recorder
        if recorder is None:
            return self.function(*args, **kwargs)
        return recorder.call_function(self.function, args, kwargs)

    def __reduce__(self) -> str:
        return self.function.__name__


@lru_cache(_MOST_FUNCTIONS)
def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    return _StandIn(function)


@lru_cache(_MOST_FUNCTIONS)
def _places_of(function: Callable[..., Any], count: int) -> list[tuple[ModuleType, str]]:
    """Where Python modules have it: the module, and the name.

    Those of modules that load themselves when they are looked at, or forbid changes, are left out.

    Args:
        function: that is looked for.
        count: of the modules that are imported; with more of them it is looked for again.
    """
    return [
        (module, name)
        for module in list(sys.modules.values())
        if type(module) is ModuleType
        for name, value in list(vars(module).items())
        if value is function
    ]


def _function_of(frame: FrameType) -> Callable[..., Any] | None:
    """The function of a Python module that runs in a frame, if it is one and has no module."""
    module = frame.f_globals.get("__name__")
    if not isinstance(module, str) or module.partition(".")[0] in _NOT_THE_MODELS:
        return None
    found = frame.f_globals.get(frame.f_code.co_name)
    found = found.function if isinstance(found, _StandIn) else found
    inner = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    if not isinstance(inner, FunctionType) or inner.__code__ is not frame.f_code:
        return None
    if found is None or inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
        return None
    given = [frame.f_locals.get(name) for name in inspect.signature(inner).parameters]
    has_modules = any(isinstance(leaf, nn.Module) for leaf in tree_leaves(given))
    return None if has_modules else found


def why_not_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a closed function must not be given these; empty if it may be."""
    leaves = tree_leaves((args, dict(kwargs)))
    odd = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_DATA))]
    return f"with a {type(odd[0]).__name__}, which it may use or change" if odd else ""


def why_nothing_made(result: Any) -> str:
    """Why a closed function must not give this; empty if it may."""
    leaves = tree_leaves(result)
    odd = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | None)]
    if odd:
        return f"which gives a {type(odd[0]).__name__}"
    return "" if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else "which gives no tensor"
