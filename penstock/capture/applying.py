"""What stands in the place of `F.apply` of autograd Functions while a forward is recorded.

What is put there may be kept by the model's Python: in a cache, or by a module that is imported
meanwhile. So it asks which recording runs in this thread, and without one it does what it is named
after.
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
    """What is asked of a recording by what stands in the place of functions.

    Attributes:
        model: whose forward runs.
    """

    model: nn.Module

    def apply_function(
        self,
        function: type[Function],
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What `function.apply(*args, **kwargs)` does; `apply` is the real thing."""

    def call_function(
        self,
        function: FunctionType,
        plain: FunctionType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the closed function does; `plain` has its code."""

    def note_values(self) -> None:
        """Python gets a tensor's values by way of something else."""


class _Recording(threading.local):
    """The recording of each thread.

    Attributes:
        recorder: what sees the forward that runs; `None` if none is recorded.
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
    """`F.apply`, as C makes it: equal to it, of the same hash, and pickled as it is."""

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
    """What stands in the place of a bound `F.apply`: the same for the same function."""
    return _Bound(function)


class Applies:
    """`Function.apply` while a forward is recorded."""

    def __get__(self, instance: object, function: type[Function]) -> Callable[..., Any]:
        return stand_in(function) if APPLY_IS_IN_C else MethodType(apply, function)


@lru_cache(1)
def bound_applies(count: int) -> list[tuple[ModuleType, str]]:
    """Where Python modules hold a bound `F.apply`: the module, and the name.

    Those of modules that load themselves when they are looked at, or forbid changes, are left out.

    Args:
        count: of the modules that are imported; as long as it is the same, no recording of a
            capture looks again.
    """
    return [
        (module, name)
        for module in list(sys.modules.values())
        if type(module) is ModuleType
        for name, value in list(vars(module).items())
        if applied_by(value)
    ]
