"""Contestants that take turns, and what their times amount to."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tick = Callable[[str], None]


@dataclass
class Contestant:
    """Something that is measured.

    Attributes:
        name: what it is called in tables and figures.
        step: does the work once.
        facts: what else the report should say of it.
        seconds: of every measured repeat.
    """

    name: str
    step: Callable[[], Any]
    facts: dict[str, Any] = field(default_factory=dict)
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
        """Their median."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was measured, as plain data."""
        return {
            "name": self.name,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "median": self.median,
            "seconds": self.seconds,
            **self.facts,
        }


def take_turns(contestants: Sequence[Contestant], repeats: int, batches: int, tick: Tick) -> None:
    """Measure all of them round by round, so that what disturbs one disturbs all.

    Args:
        contestants: who takes part.
        repeats: rounds, after one that warms up.
        batches: steps per repeat.
        tick: called before each, with what is measured.
    """
    for turn in range(repeats + 1):
        for contestant in contestants:
            tick(contestant.name)
            start = time.perf_counter()
            for _ in range(batches):
                contestant.step()
            if turn:
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
    }
