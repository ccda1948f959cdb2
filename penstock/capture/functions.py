"""Custom `autograd.Function`s, as functions that a recording can call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Applied:
    """What applies an `autograd.Function`; equal for the same one.

    Attributes:
        function: the class.
    """

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `Function.apply`."""
        return self.function.apply(*args, **kwargs)


def invoke(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function: lowered code calls by their names only what can be imported."""
    return function(*args, **kwargs)
