"""How long work on a device takes: by the clock on CPUs, by events where there are streams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.devices.kind import Moment
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
        launching: seconds in which the CPU gives the device the work of the whole program; `None`
            in passes that do not measure it, as on CPUs.
    """

    forward: list[float]
    backward: list[float]
    wholes: list[tuple[float, float]]
    shares: list[float] | None = None
    launching: float | None = None

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


class Stopwatch:
    """Times pieces of work, `with watch: ...`.

    On a device with streams, the time of a piece runs from the moment at which the stream reaches
    it until it is done, by events. So work is queued ahead, as in a real run, and nothing waits for
    the device before `seconds`.

    Args:
        device: the device of the work. Creating a stopwatch waits until the device is idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self._kind.synchronize(device)
        self._ends: list[tuple[Moment | float, Moment | float]] = []

    def _now(self) -> Moment | float:
        if self._kind.has_streams:
            return self._kind.moment(self._device)
        return time.perf_counter()

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, *_: object) -> None:
        self._ends.append((self._begun, self._now()))

    def seconds(self) -> list[float]:
        """What each piece took; waits for the last."""
        return [_between(*ends) for ends in self._ends]


def _between(begin: Moment | float, end: Moment | float) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def launching(work: Callable[[], object], device: torch.device) -> float:
    """Seconds in which the CPU gives some work to the device, which has nothing else to do."""
    begun = now(device)
    work()
    return time.perf_counter() - begun


def roots_of(results: Sequence[Any]) -> list[torch.Tensor]:
    """The results that a backward starts from, each once."""
    roots = [t for t in results if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    return list({id(t): t for t in roots}.values())


def timed_backward(results: Sequence[Any], watch: Stopwatch, again: bool = False) -> None:
    """Time a backward from these results; none of them may be a leaf.

    Args:
        results: where it starts; what is no tensor with a history does not count.
        watch: times it.
        again: keep the graph for another backward.
    """
    roots = roots_of(results)
    grads = [torch.ones_like(root) for root in roots]
    with watch:
        if roots:
            torch.autograd.backward(roots, grads, retain_graph=again)
