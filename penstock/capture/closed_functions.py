"""Plain functions that a program calls whole, as it calls closed modules.

A helper that makes a mask of lengths may read values (`int(lengths.max())`), but takes and returns
tensors. Such a function is closed, instead of the module whose forward calls it. It is found on the
stack when it does something that cannot be recorded. A function that draws a mask with numpy has
returned by the time its array is used, or the next call shows that something was drawn; it is found
among the names in the code that called it. From then on, the function's code is replaced while a
forward is recorded, so that the recording sees its calls. Arrays that it returns can be passed on
to calls, and used in no other way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.capture.applying import RECORDING
from penstock.capture.calls import Call, Unrecordable
from penstock.capture.code import impurity, is_the_models, names_of, uses_arrays
from penstock.capture.functions import Whole
from penstock.capture.trees import tree_leaves

_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MARK = 0x5EED_0F_A_C0DE  # in generated code, stands for the function to call


@dataclass(frozen=True)
class ClosedFunction(Whole):
    """The target of a call of a plain function; two are equal if their functions are the same.

    Attributes:
        function: the function that is called.
    """

    function: FunctionType

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

    def __init__(self, path: str, function: FunctionType, why: str) -> None:
        super().__init__(path, f"it calls {function.__name__}() {why}")
        self.function = function


class ClosedFunctions:
    """Which plain functions are closed."""

    def __init__(self) -> None:
        self._closed: dict[FunctionType, str] = {}
        self._never: set[FunctionType] = set()

    def close(self, function: FunctionType, why: str) -> None:
        """Close a function from now on, for this reason."""
        self._closed[function] = why

    def reopen(self, function: FunctionType) -> None:
        """Open one for good."""
        self._closed.pop(function, None)
        self._never.add(function)

    def reasons(self, calls: Iterable[Call]) -> dict[str, str]:
        """Why the functions that are called are closed, by names such as `module.function()`.

        Args:
            calls: the calls of all recordings.
        """
        called = [c.target.function for c in calls if isinstance(c.target, ClosedFunction)]
        return {f"{f.__module__}.{f.__name__}()": self._closed[f] for f in dict.fromkeys(called)}

    def running(self, frame: FrameType | None, until: Container[CodeType]) -> FunctionType | None:
        """The innermost function that runs and may be closed; `None` if there is none.

        Args:
            frame: the frame from which to search the stack: that of the call that cannot be
                recorded.
            until: the code that calls modules; the search ends at a frame that runs it.
        """
        while frame is not None and frame.f_code not in until:
            function = _function_of(frame)
            if function is not None and self._may_close(function) and not _has_modules(frame):
                return function
            frame = frame.f_back
        return None

    def called(self, frame: FrameType | None, until: Container[CodeType]) -> FunctionType | None:
        """A function that uses numpy or `random`, and that running code may have called.

        Args:
            frame: the frame from which to search the stack: that of the call that shows it.
            until: the code that calls modules; the search ends at a frame that runs it.

        Returns:
            the first function found that may be closed; `None` if there is none.
        """
        while frame is not None and frame.f_code not in until:
            names = frame.f_code.co_names if is_the_models(frame.f_globals) else ()
            for found in map(frame.f_globals.get, names):
                if (
                    isinstance(found, FunctionType)
                    and uses_arrays(found)
                    and self._may_close(found)
                ):
                    return found
            frame = frame.f_back
        return None

    def _may_close(self, function: FunctionType) -> bool:
        """Whether a function is open and may be closed."""
        known = function in self._never or function in self._closed
        return not (known or impurity(function))

    def codes(self) -> Iterator[tuple[FunctionType, str, CodeType]]:
        """What to replace during a recording: the function, its attribute, and the new value."""
        for function in self._closed:
            yield function, "__code__", _noting(function)


def _noting(function: FunctionType) -> CodeType:
    """Code with the function's signature that passes calls on to the recording in this thread.

    Where this thread has no recording, it runs the function.
    """
    code = function.__code__
    plain = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    plain.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = RECORDING.recorder
        if recorder is None:
            return plain(*args, **kwargs)
        return recorder.call_function(function, plain, args, kwargs)

    made: dict[str, Any] = {}
    exec(_source(code), made)
    template: CodeType = made["_noted"].__code__
    return template.replace(
        co_consts=tuple(call if each == _MARK else each for each in template.co_consts),
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def _source(code: CodeType) -> str:
    """Source of a function with the same signature that calls what replaces `_MARK` in it."""
    names = iter(names_of(code))
    positional = [next(names) for _ in range(code.co_argcount)]
    keywords = [next(names) for _ in range(code.co_kwonlyargcount)]
    taken, given = list(positional), list(positional)
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        name = next(names)
        taken.append(f"*{name}")
        given.append(f"*{name}")
    elif keywords:
        taken.append("*")
    taken += keywords
    given += [f"{name}={name}" for name in keywords]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        name = next(names)
        taken.append(f"**{name}")
        given.append(f"**{name}")
    call = f"_noted_call = {_MARK}; return _noted_call({', '.join(given)})"
    return f"def _noted({', '.join(taken)}): {call}"


class UnseenArray:
    """Stands for an array that a closed function has given, into which Python must not look.

    Args:
        array: the array.
        refuse: makes the error that is raised when Python looks into the array.
    """

    def __init__(self, array: np.ndarray[Any, Any], refuse: Callable[[], Unclosable]) -> None:
        self._array, self._refuse = array, refuse

    def __getattr__(self, name: str) -> Any:
        raise self._refuse()

    def __bool__(self) -> bool:
        raise self._refuse()

    def __eq__(self, other: object) -> bool:
        raise self._refuse()

    __hash__ = object.__hash__

    @staticmethod
    def array_of(leaf: Any) -> Any:
        """The array, if it stands for one; anything else as it is."""
        return leaf._array if type(leaf) is UnseenArray else leaf


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that runs in a frame, if its module's globals hold it; else `None`."""
    if not is_the_models(frame.f_globals):
        return None
    found = frame.f_globals.get(frame.f_code.co_name)
    while isinstance(found, FunctionType):
        if found.__code__ is frame.f_code:
            return found
        found = vars(found).get("__wrapped__")
    return None


def _has_modules(frame: FrameType) -> bool:
    """Whether what runs was given modules."""
    given = [frame.f_locals.get(name) for name in names_of(frame.f_code)]
    return any(isinstance(leaf, nn.Module) for leaf in tree_leaves(given))


def why_not_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a closed function must not be given these; empty if it may be."""
    return next(filter(None, map(_why_not_given, (*args, *kwargs.values()))), "")


def _why_not_given(value: Any) -> str:
    if isinstance(value, tuple):
        return next(filter(None, map(_why_not_given, value)), "")
    if isinstance(value, (torch.Tensor, *_DATA)):
        return ""
    return f"with a {type(value).__name__}, which it may use or change"


def why_nothing_made(result: Any) -> str:
    """Why a closed function must not give this; empty if it may."""
    leaves = tree_leaves(result)
    odd = [x for x in leaves if not isinstance(x, torch.Tensor | np.ndarray | None)]
    if odd:
        return f"which gives a {type(odd[0]).__name__}"
    return "" if any(leaf is not None for leaf in leaves) else "which gives nothing"
