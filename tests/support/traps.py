"""A module in which tests let things happen in the midst of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Trap(nn.Module):
    """Multiplies by its weight; where it is armed, a function is called in the midst of it.

    Attributes:
        mode: `"where"` is `"forward"`, `"backward"` or nothing; `"after"` how many micro-batches
            are let through; `"do"` the function, which is called once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.mode: dict[str, Any] = {"where": ""}

    def arm(self, where: str, do: Callable[[], Any], after: int = 1) -> None:
        """Have a function called in the forward or the backward of a micro-batch."""
        self.mode.update(where=where, after=after, do=do)  # in place: backwards have this one

    def disarm(self) -> None:
        """Let it do nothing."""
        self.mode.update(where="")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Spring.apply(x * self.weight, self.mode)


class _Spring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mode: dict[str, Any]) -> torch.Tensor:
        ctx.mode = mode
        _spring(mode, "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _spring(ctx.mode, "backward")
        return gradient, None


def _spring(mode: dict[str, Any], where: str) -> None:
    if mode["where"] == where:
        mode["after"] -= 1
        if mode["after"] == -1:
            mode["do"]()


def divide() -> None:
    """Fail."""
    _ = 1 / 0  # the line that tracebacks must show
