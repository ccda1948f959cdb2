"""Stand-ins for `F.apply` of autograd Functions while a forward is recorded.

The model's Python may keep a stand-in: in a cache, or in a module that is imported during the
recording. So a stand-in looks up, on every call, which recording runs in this thread; if none does,
it behaves like the original.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from torch import nn
from torch.autograd import Function

from penstock.torch_internals import APPLY_IS_IN_C, applied_by, plain_apply

_MOST_FUNCTIONS = 1024


class Noticing(Protocol):
    """The interface of a recorder for the stand-ins of functions.

    Attributes:
        model: the model whose forward is recorded.
    """

    model: nn.Module

    def apply_function(
        self,
        function: type[Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what `function.apply(*args, **kwargs)` does; `apply` is the original method."""

    def call_function(
        self,
        function: FunctionType,
        plain: FunctionType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what the closed `function` does; `plain` is a copy of it with its original code."""

    def note_values(self) -> None:
        """Note that Python gets a tensor's values by a method such as `tolist` or `numpy`."""


class _Recording(threading.local):
    """The recording of each thread.

    Attributes:
        recorder: records the forward that runs; `None` if no forward is being recorded.
    """

    recorder: Noticing | None = None


RECORDING = _Recording()


def apply(function: type[Function], /, *args: Any, **kwargs: Any) -> Any:
    """What `function.apply(*args, **kwargs)` does, in a recording or not."""
    recorder = RECORDING.recorder
    plain = plain_apply(function)
    if recorder is None:
        return plain(*args, **kwargs)
    return recorder.apply_function(function, plain, args, kwargs)


class _Bound:
    """Stands for a bound `F.apply` in C: equal to it, with the same hash, pickled as `F.apply`."""

    __name__ = "apply"

    def __init__(self, function: type[Function]) -> None:
        self.__self__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return apply(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        applied = other.__self__ if isinstance(other, _Bound) else applied_by(other)
        return applied is self.__self__

    def __hash__(self) -> int:
        return hash(plain_apply(self.__self__))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.__self__, "apply")

    @property
    def __class__(self) -> type:
        return BuiltinMethodType

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("the class of a method cannot be changed")


@lru_cache(_MOST_FUNCTIONS)
def stand_in(function: type[Function]) -> Callable[..., Any]:
    """The stand-in for a bound `F.apply`: the same object every time for the same function."""
    return _Bound(function)


class Applies:
    """The descriptor that takes the place of `Function.apply` while a forward is recorded."""

    def __get__(self, instance: object, function: type[Function]) -> Callable[..., Any]:
        return stand_in(function) if APPLY_IS_IN_C else MethodType(apply, function)


@lru_cache(1)
def bound_applies(count: int) -> list[tuple[ModuleType, str]]:
    """Where Python modules hold a bound `F.apply`: the module, and the name.

    Modules of a class of their own, which may load or forbid something on access, are left out.

    Args:
        count: the number of imported modules. The result is cached: while the number stays the
            same, the recordings of a capture do not search again.
    """
    return [
        (module, name)
        for module in list(sys.modules.values())
        if type(module) is ModuleType
        for name, value in list(vars(module).items())
        if applied_by(value)
    ]
