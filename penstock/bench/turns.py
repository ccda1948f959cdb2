"""Contestants that take turns, and what their times amount to."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.profile.measure import Progress

Tick = Callable[[str], None]
"""Called before every turn, with who has it."""


@dataclass
class Contestant:
    """Something that is measured.

    Attributes:
        name: what it is called in tables and figures.
        step: does the work once.
        facts: what else the report should say of it.
        inner: seconds of every `train_step` within `step`, which appends them; empty if it has
            none.
        warm_up: seconds of the step that was not measured.
        seconds: of every measured repeat.
    """

    name: str
    step: Callable[[], Any]
    facts: dict[str, Any] = field(default_factory=dict)
    inner: list[float] = field(default_factory=list)
    warm_up: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The mean of the repeats, in seconds."""
        return statistics.fmean(self.seconds)

    @property
    def deviation(self) -> float:
        """Their standard deviation; 0 for a single one."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0

    @property
    def median(self) -> float:
        """The median seconds of a repeat."""
        return statistics.median(self.seconds)

    @property
    def train_step(self) -> float | None:
        """The median seconds of a `train_step`, without the optimizer."""
        return statistics.median(self.inner) if self.inner else None

    @property
    def percent_of_bound(self) -> float | None:
        """Which share of the lower bound of its plan the `train_step` reached."""
        bound: float | None = self.facts.get("bound_seconds")
        return None if bound is None or not self.train_step else 100 * bound / self.train_step

    def to_dict(self) -> dict[str, Any]:
        """Everything that was measured, as plain data."""
        measured = {
            "name": self.name,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "median": self.median,
            "seconds": self.seconds,
        }
        inner = {
            "train_step_seconds": self.inner,
            "median_train_step_seconds": self.train_step,
            "percent_of_bound": self.percent_of_bound,
        }
        return {**measured, **self.facts, **(inner if self.inner else {})}


class Ticker:
    """Counts what has been done, for the progress bar.

    Args:
        total: of turns.
        report: told how many are done, of how many, and whose turn it is.
        prefix: of whose turn it is.
    """

    def __init__(self, total: int, report: Progress, prefix: str = "") -> None:
        self._total, self._report, self._prefix, self._done = total, report, prefix, 0

    def __call__(self, what: str) -> None:
        """Report that the next turn begins."""
        self._report(self._done, self._total, f"{self._prefix}{what}")
        self._done += 1


def warm_up(contestants: Sequence[Contestant], tick: Tick) -> None:
    """One step of each that does not count, but shows how long one takes."""
    for contestant in contestants:
        tick(contestant.name)
        start = time.perf_counter()
        contestant.step()
        contestant.warm_up = time.perf_counter() - start
        contestant.inner.clear()


def take_turns(contestants: Sequence[Contestant], repeats: int, batches: int, tick: Tick) -> None:
    """Measure all of them round by round, so that what disturbs one disturbs all.

    The order of a round is drawn anew, the same in every run: nobody always follows the same one.

    Args:
        contestants: who takes part; they have warmed up.
        repeats: rounds.
        batches: steps of each in a round.
        tick: called before each turn.
    """
    drawn = random.Random(0)
    for _ in range(repeats):
        for contestant in drawn.sample(contestants, len(contestants)):
            tick(contestant.name)
            start = time.perf_counter()
            for _ in range(batches):
                contestant.step()
            contestant.seconds.append(time.perf_counter() - start)


def machine() -> dict[str, Any]:
    """What the measurements ran on."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        processor = named[0] if named else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
