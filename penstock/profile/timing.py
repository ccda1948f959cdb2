"""Reading the clock around work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.devices.kinds import kind_of


@dataclass(frozen=True)
class Timing:
    """Seconds of one pass.

    Attributes:
        forward: of every call on its own; empty if only the whole was timed.
        backward: of every call on its own, likewise.
        wholes: forward and backward of the whole program, as it will run.
        shares: of every call the part of its backward that is for its weights alone and can be
            put off, from 0 to 1; `None` in passes that do not measure it.
    """

    forward: list[float]
    backward: list[float]
    wholes: list[tuple[float, float]]
    shares: list[float] | None = None

    @property
    def whole(self) -> tuple[float, float]:
        """Seconds of the whole program, forward and backward: the mean of the runs.

        A step is a sum of many such runs, so what slows down some of them slows it down as well.
        """
        forwards, backwards = zip(*self.wholes, strict=True)
        return statistics.fmean(forwards), statistics.fmean(backwards)


def spread(timings: Sequence[Timing]) -> float:
    """How far the whole program's times lie apart: the middle half of them, per their median."""
    low, middle, high = np.percentile([sum(timing.whole) for timing in timings], [25, 50, 75])
    return float((high - low) / middle)


def now(device: torch.device) -> float:
    """The time in seconds, once the device has done what it was given."""
    kind_of(device).synchronize(device)
    return time.perf_counter()


def roots_of(results: Sequence[Any]) -> list[torch.Tensor]:
    """The results that a backward starts from, each once."""
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    return list({id(t): t for t in roots}.values())


def timed_backward(results: Sequence[Any], device: torch.device, again: bool = False) -> float:
    """Seconds that a backward from these results takes; none of them may be a leaf.

    Args:
        results: where it starts; what is no tensor with a history does not count.
        device: where they are.
        again: keep the graph for another backward.
    """
    roots = roots_of(results)
    grads = [torch.ones_like(root) for root in roots]
    begin = now(device)
    if roots:
        torch.autograd.backward(roots, grads, retain_graph=again)
    return now(device) - begin
