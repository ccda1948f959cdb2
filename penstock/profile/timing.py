"""Reading the clock around work on a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass.

    Attributes:
        forward: of every call on its own.
        backward: of every call on its own.
        wholes: forward and backward of the whole program, as it will run.
    """

    forward: list[float]
    backward: list[float]
    wholes: list[tuple[float, float]]


def now(device: torch.device) -> float:
    """The time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed_backward(results: Sequence[Any], device: torch.device) -> float:
    """Seconds that a backward from these results takes; none of them may be a leaf."""
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    roots = list({id(t): t for t in roots}.values())
    grads = [torch.ones_like(root) for root in roots]
    begin = now(device)
    if roots:
        torch.autograd.backward(roots, grads)
    return now(device) - begin
