"""Brute force over every way to cut, which the partition has to equal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.plan.partition import CapacityError, Partition, Variant, partition, shortfall

Table = list[list[float]]


@dataclass(frozen=True)
class Option:
    """A variant, in lists; with no memory where that is empty."""

    seconds: Table
    memory: Table = field(default_factory=list)
    entry: Table = field(default_factory=list)

    def variant(self) -> Variant:
        return Variant(
            np.array(self.seconds),
            np.array(self.memory) if self.memory else None,
            np.array(self.entry) if self.entry else None,
        )

    def bytes(self, device: int, first: int, last: int) -> float:
        held = sum(self.memory[device][first:last]) if self.memory else 0.0
        return held + (self.entry[device][first] if self.entry else 0.0)


@dataclass(frozen=True)
class Problem:
    """What to partition; `latency` has a row per link."""

    options: list[Option]
    latency: Table
    allowed: list[bool]
    tie: list[float]
    m: int
    fill: float
    caps: list[float] | None = None

    @property
    def stages(self) -> int:
        return len(self.options[0].seconds)

    @property
    def calls(self) -> int:
        return len(self.options[0].seconds[0])

    def solve(self) -> Partition:
        return partition(
            [option.variant() for option in self.options],
            num_microbatches=self.m,
            fill=self.fill,
            latency=np.array(self.latency).reshape(self.stages - 1, self.calls + 1),
            allowed=self.allowed,
            tie=np.array(self.tie),
            caps=self.caps,
        )

    def every_way_to_cut(self) -> Iterator[tuple[int, ...]]:
        positions = [k for k in range(1, self.calls) if self.allowed[k]]
        return itertools.combinations(positions, self.stages - 1)

    def every_choice(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The cuts and the variants of everything that fits."""
        for cuts in self.every_way_to_cut():
            fit = [
                [v for v in range(len(self.options)) if self.over(s, a, b, v) <= 0]
                for s, (a, b) in enumerate(self.edges(cuts))
            ]
            yield from ((cuts, variants) for variants in itertools.product(*fit))

    def edges(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise([0, *cuts, self.calls]))

    def over(self, stage: int, first: int, last: int, variant: int) -> float:
        """The bytes that a stage takes beyond its cap."""
        cap = math.inf if self.caps is None else self.caps[stage]
        return self.options[variant].bytes(stage, first, last) - cap

    def objective(self, cuts: Sequence[int], variants: Sequence[int] | None = None) -> float:
        edges = self.edges(cuts)
        variants = variants or (0,) * self.stages
        work = [
            sum(self.options[v].seconds[s][a:b])
            for s, (v, (a, b)) in enumerate(zip(variants, edges, strict=True))
        ]
        hops = [0.0, *(2 * self.latency[s][b] for s, (_, b) in enumerate(edges[:-1]))]
        return max(
            self.fill * (sum(work[:s]) + sum(hops[: s + 1])) + self.m * work[s]
            for s in range(self.stages)
        )

    def best(self) -> float:
        return min((self.objective(*choice) for choice in self.every_choice()), default=math.inf)

    def ties(self, cuts: Sequence[int]) -> float:
        return sum(self.tie[k] for k in cuts)

    def least_ties(self) -> float:
        """Of the optimal partitions."""
        best = self.best()
        return min(self.ties(c) for c, v in self.every_choice() if self.objective(c, v) == best)

    def shortfall(self) -> float:
        """The least bytes more of every device that would do; 0 if none are needed."""
        worst = (
            max(
                min(self.over(s, a, b, v) for v in range(len(self.options)))
                for s, (a, b) in enumerate(self.edges(cuts))
            )
            for cuts in self.every_way_to_cut()
        )
        return max(0.0, min(worst))

    def check(self) -> None:
        """Optimal, the lightest of the optimal, and what it says of itself is true."""
        best = self.best()
        try:
            found = self.solve()
        except CapacityError as error:
            assert best == math.inf
            self.check_shortfall(error)
            return
        assert found.objective == best
        assert (found.cuts, found.variants) in self.every_choice()
        assert self.objective(found.cuts, found.variants) == best
        assert self.ties(found.cuts) == self.least_ties()
        assert found.devices == tuple(range(self.stages))

    def check_shortfall(self, error: CapacityError) -> None:
        """The amount is right, and its partition needs it at the stage that is named."""
        short = error.shortfall
        assert short.bytes == self.shortfall() > 0
        over = [
            self.over(s, a, b, v)
            for s, (v, (a, b)) in enumerate(
                zip(short.partition.variants, self.edges(short.partition.cuts), strict=True)
            )
        ]
        assert self.caps is not None
        assert over[short.stage] == max(over) == short.bytes
        assert short.calls == self.edges(short.partition.cuts)[short.stage]
        assert short.needed == self.caps[short.device] + short.bytes
        variants = [option.variant() for option in self.options]
        tie = np.array(self.tie)
        assert shortfall(variants, caps=self.caps, allowed=self.allowed, tie=tie) == short


def lists(draw: st.DrawFn, of: st.SearchStrategy[Any], *shape: int) -> list[Any]:
    """Lists within lists of this shape."""
    strategy = of
    for length in reversed(shape):
        strategy = st.lists(strategy, min_size=length, max_size=length)
    return draw(strategy)


def allowed_cuts(draw: st.DrawFn, stages: int, calls: int) -> list[bool]:
    """Some forbidden ones, but not too many."""
    allowed: list[bool] = lists(draw, st.booleans(), calls + 1)
    for k in draw(st.permutations(range(1, calls)))[: stages - 1]:
        allowed[k] = True
    return allowed


# The most stages, calls and variants: every product of these can be looked at.
SIZES = [(6, 9, 1), (4, 14, 1), (3, 9, 2), (4, 7, 2), (3, 7, 3)]


@st.composite
def problems(draw: st.DrawFn, numbers: st.SearchStrategy[float], memory: bool = False) -> Problem:
    """Random ones; with caps and variants where there is `memory`."""
    most_stages, most_calls, most_options = draw(st.sampled_from(SIZES))
    p = draw(st.integers(1, most_stages))
    n = draw(st.integers(p, most_calls))
    sizes = st.integers(0, 6).map(float)

    def option() -> Option:
        same = draw(st.booleans())
        seconds = lists(draw, numbers, n)
        if not memory:
            return Option([seconds] * p if same else lists(draw, numbers, p, n))
        return Option(
            [seconds] * p if same else lists(draw, numbers, p, n),
            lists(draw, sizes, p, n),
            lists(draw, sizes, p, n + 1),
        )

    shared = lists(draw, numbers, n + 1) if draw(st.booleans()) else [0.0] * (n + 1)
    return Problem(
        options=[option() for _ in range(draw(st.integers(1, most_options)) if memory else 1)],
        latency=lists(draw, numbers, p - 1, n + 1) if draw(st.booleans()) else [shared] * (p - 1),
        allowed=allowed_cuts(draw, p, n),
        tie=lists(draw, numbers, n + 1),
        m=draw(st.integers(1, 8)),
        fill=draw(st.sampled_from([0.0, 0.5, 1.0])),
        caps=lists(draw, st.integers(0, 6 * n // p + 6).map(float), p) if memory else None,
    )
