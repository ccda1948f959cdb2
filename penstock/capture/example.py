"""The example that a model is run on to see what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import InputError


def check_example(model: Any, args: Any, kwargs: Any, dynamic: Any) -> None:
    """Raise if this is no model, or no example of what it is called with.

    Raises:
        InputError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not an nn.Module")
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is a {type(args).__name__}, not the tuple of the model's positional arguments; "
            "write args=(x,)"
        )
    if not isinstance(kwargs, (Mapping, type(None))):
        raise InputError(
            f"kwargs is a {type(kwargs).__name__}, not the dict of the model's keyword arguments; "
            'write kwargs={"x": x}'
        )
    if not isinstance(dynamic, (Mapping, type(None))):
        raise InputError(
            f"dynamic={dynamic!r} is no dict of inputs and their dimensions that vary; write "
            'dynamic={"input_ids": {1: "length"}}'
        )
    if not args and not kwargs:
        raise InputError(
            f"{type(model).__name__} is run once to see what it does, and needs an example for "
            'that: its arguments for a usual batch, Pipeline(model, (x,), ...) or kwargs={"x": x}'
        )


def unpacked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hint for who gives a batch as it comes from a data loader."""
    if len(args) == 1 and not kwargs and isinstance(args[0], (tuple, list)):
        return " (a batch that is a tuple is unpacked by *batch)"
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        return " (a batch that is a dict is unpacked by **batch)"
    return ""
