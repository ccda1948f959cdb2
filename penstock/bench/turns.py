"""Contestants that take turns, and what their times amount to."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.display.terminal import Progress

AUDITED = 20  # first steps, which Penstock audits
UNAUDITED = None
"""`audit=` of pipelines of which few steps are measured: else all of these would be audited,
while audits take less than 0.5 % of a whole training."""

Tick = Callable[[str], None]
"""Called before every turn, with who has it."""


class Timed(Protocol):
    """What can take turns."""

    @property
    def name(self) -> str:
        """What it is called in tables and figures."""

    def step(self) -> float:
        """Do the work once, and return its seconds."""


@dataclass
class Contestant:
    """Something that is measured.

    Attributes:
        name: what it is called in tables and figures.
        step: does the work once, and returns its seconds.
        facts: what else the report should say of it.
        inner: seconds of every `train_step` within `step`, which appends them; empty if it has
            none.
        warm_up: seconds of the step that was not measured.
        seconds: of every measured repeat.
    """

    name: str
    step: Callable[[], float]
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
        """The lower bound of its plan, in percent of the time of a `train_step`."""
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


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The median of two values or more, and half of the distance between the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2


@dataclass(frozen=True)
class Ratio:
    """The time of a contestant's steps over that of another's, round by round.

    Attributes:
        median: of all rounds.
        spread: half of the distance between the quartiles.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float], others: Sequence[float]) -> Ratio:
        """The seconds of every round over those of another in the same rounds, two at least."""
        return cls(*middle([own / other for own, other in zip(seconds, others, strict=True)]))

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.spread:.3f}"


class Ticker:
    """Counts what has been done, for the progress bar.

    Args:
        total: the number of turns.
        report: called with the number of turns that are done, their total, and whose turn it is.
        prefix: put before the name of whose turn it is.
    """

    def __init__(self, total: int, report: Progress, prefix: str = "") -> None:
        self._total, self._report, self._prefix, self._done = total, report, prefix, 0

    def __call__(self, what: str) -> None:
        """Report that the next turn begins."""
        self._report(self._done, self._total, f"{self._prefix}{what}")
        self._done += 1


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """A contestant's step: does this work, and returns the seconds that it takes."""

    def step() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return step


def warm_up(contestants: Sequence[Contestant], tick: Tick) -> None:
    """One step of each that does not count, but shows how long one takes."""
    for contestant in contestants:
        tick(contestant.name)
        contestant.warm_up = contestant.step()
        contestant.inner.clear()


def take_turns(
    contestants: Sequence[Timed],
    rounds: int,
    tick: Tick = lambda _: None,
    *,
    steps: int = 1,
    warm_up: int = 0,
    seed: int = 0,
) -> list[list[float]]:
    """Measure all of them round by round, so that what disturbs one disturbs all.

    The order of a round is drawn anew, the same in every run: nobody always follows the same one.

    Args:
        contestants: who takes part.
        rounds: that count.
        tick: called before each turn.
        steps: of each in a round.
        warm_up: rounds before, which do not count.
        seed: of the order.

    Returns:
        for each contestant, in the order given, the mean seconds of its steps in every round.
    """
    drawn = random.Random(seed)
    seconds: list[list[float]] = [[] for _ in contestants]
    for turn in range(warm_up + rounds):
        for k in drawn.sample(range(len(contestants)), len(contestants)):
            tick(contestants[k].name)
            mean = statistics.fmean([contestants[k].step() for _ in range(steps)])
            if turn >= warm_up:
                seconds[k].append(mean)
    return seconds


def measure(contestants: Sequence[Contestant], repeats: int, batches: int, tick: Tick) -> None:
    """Let contestants take turns, and note the seconds of each one's repeats.

    Args:
        contestants: who takes part; they have warmed up.
        repeats: that are measured.
        batches: steps in a repeat.
        tick: called before each turn.
    """
    taken = take_turns(contestants, repeats, tick, steps=batches)
    for contestant, means in zip(contestants, taken, strict=True):
        contestant.seconds += [batches * mean for mean in means]
