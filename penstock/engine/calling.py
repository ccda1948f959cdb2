"""Whether the user's loss and metrics can be called as they will be, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from penstock.errors import InputError


def callable_as(
    what: str, function: Any, has_target: bool, more: Mapping[str, Any]
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
        hint = ", as no target= was given: train_step(..., target=y)"
    name = getattr(function, "__name__", type(function).__name__)
    raise InputError(f"{what}={name} is called as {name}({called}){hint}; {why}")


def _surely_takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it takes so many arguments, if that is easily seen: this is asked at every step."""
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
