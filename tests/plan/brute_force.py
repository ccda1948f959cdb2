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

from penstock.plan.partition import CapacityError, Partition, Variant, partition

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


# The most stages, calls and variants: every product of these can be looked at.
SIZES = [(6, 10, 1), (4, 14, 1), (4, 8, 2), (3, 12, 2), (3, 8, 3)]


class Numbers:
    """Random lists within lists; their own generator makes even large ones cheap to draw."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def whole(self, *shape: int, most: int = 6) -> Any:
        return self.rng.integers(0, most + 1, shape).astype(float).tolist()

    def any(self, *shape: int) -> Any:
        """Of all magnitudes, and some zeros."""
        numbers = self.rng.lognormal(0.0, 2.0, shape)
        return np.where(self.rng.random(shape) < 0.1, 0.0, numbers).tolist()

    def allowed(self, stages: int, calls: int) -> list[bool]:
        """Some forbidden cuts, but not too many."""
        allowed = self.rng.random(calls + 1) < 0.8
        allowed[1 + self.rng.permutation(calls - 1)[: stages - 1]] = True
        return list(allowed.tolist())


def random_problem(seed: int, whole: bool, memory: bool) -> Problem:
    """In whole seconds or in any; with caps and variants where there is `memory`."""
    numbers = Numbers(seed)
    rng = numbers.rng
    seconds = numbers.whole if whole else numbers.any
    most_stages, most_calls, most_options = SIZES[rng.integers(len(SIZES))]
    p = int(rng.integers(1, most_stages + 1))
    n = int(rng.integers(p, most_calls + 1))

    def option() -> Option:
        work = [seconds(n)] * p if rng.random() < 0.3 else seconds(p, n)
        return (
            Option(work, numbers.whole(p, n), numbers.whole(p, n + 1)) if memory else Option(work)
        )

    one_for_all = [[0.0] * (n + 1), seconds(n + 1)][rng.integers(2)]
    ample = rng.uniform(2.0, 6.0)
    return Problem(
        options=[option() for _ in range(most_options if memory else 1)],
        latency=seconds(p - 1, n + 1) if rng.random() < 0.3 else [one_for_all] * (p - 1),
        allowed=numbers.allowed(p, n),
        tie=numbers.whole(n + 1),
        m=int(rng.integers(1, 9)),
        fill=float(rng.choice([0.0, 0.5, 1.0, 3.0])),
        caps=numbers.whole(p, most=round(ample * (3 * n / p + 3))) if memory else None,
    )


def problems(whole: bool = True, memory: bool = False) -> st.SearchStrategy[Problem]:
    """Random ones, of all sizes alike; hypothesis by itself prefers the small."""
    return st.integers(0, 2**40).map(lambda seed: random_problem(seed, whole, memory))
