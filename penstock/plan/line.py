"""The problem of the partition, in the form in which it is solved.

Stages are filled from the first to the last. A *node* says which devices have been used: for
devices in a given order it is their number; for devices of few kinds, how many of each. A *step*
from one node to a later one adds a stage on a device. A *state* is a node and a position: the
devices of the node hold the calls before the position. Positions run from 0 to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.plan.call_costs import Floats, Terms, Variant, checked


class Step(NamedTuple):
    """A stage that is added.

    Attributes:
        source: the node before it.
        target: the node after it; larger than `source`.
        row: of the costs.
        device: which of the devices, or of their kinds, the row is about.
        stage: how many stages come before it.
    """

    source: int
    target: int
    row: int
    device: int
    stage: int


@dataclass(frozen=True, eq=False)
class Way:
    """A variant on a device.

    Attributes:
        each: (n,); the seconds of every call.
        until: (n + 1); the seconds of all calls before position `k`.
        furthest: (n + 1); where a stage that begins at `k` has to end to fit the memory. At least
            `k`.
        base: (n + 1); what a stage adds to the objective because it begins at `k`.
    """

    each: Floats
    until: Floats
    furthest: NDArray[np.intp]
    base: Floats

    @classmethod
    def of(cls, seconds: Floats, memory: Floats, entry: Floats, cap: float) -> Way:
        """The calls' seconds and memory, what entering costs, and what there is."""
        until, held = _until(seconds), _until(memory)
        reach = np.searchsorted(held, held + (cap - entry), side="right") - 1
        furthest = np.maximum(reach, np.arange(len(held)))
        return cls(seconds, until, furthest, np.broadcast_to(np.float64(0), held.shape))

    @classmethod
    def of_bytes(cls, memory: Floats, entry: Floats, cap: float) -> Way:
        """The same with the roles exchanged: the objective is the bytes beyond the cap."""
        until = _until(memory)
        return cls(memory, until, np.full(until.shape, len(memory)), entry - cap)


class Route(NamedTuple):
    """One way through: where to cut, and for every stage its step and the number of its way."""

    cuts: tuple[int, ...]
    steps: tuple[Step, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Line:
    """Every way that a stage can be added, and what is asked.

    Attributes:
        steps: by ascending source.
        ways: the variants of every row of the costs.
        least: (n + 1); the seconds of all calls before position `k`, each on its fastest row.
        terms: the rest.
        whole: objectives are whole numbers, and limits have to be, for sums to be exact.
    """

    steps: tuple[Step, ...]
    ways: tuple[tuple[Way, ...], ...]
    least: Floats
    terms: Terms
    whole: bool = False

    @classmethod
    def of(
        cls, variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
    ) -> Line:
        """The line of minimising seconds within the caps.

        Raises:
            InputError: memory or entry of the wrong shape, or not finite, or negative.
        """
        tables = [_tables(variant) for variant in variants]
        ways = tuple(
            tuple(Way.of(s[row], memory[row], entry[row], cap) for s, memory, entry in tables)
            for row, cap in enumerate(caps.tolist())
        )
        fastest = np.min([s.min(axis=0) for s, _, _ in tables], axis=0)
        return cls(tuple(steps), ways, _until(fastest), terms)

    @classmethod
    def of_bytes(
        cls, variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
    ) -> Line:
        """The line of minimising the bytes by which a device exceeds its cap.

        A bottleneck in bytes instead of seconds, without any elapsed time.
        """
        tables = [_tables(variant) for variant in variants]
        ways = tuple(
            tuple(Way.of_bytes(memory[row], entry[row], cap) for _, memory, entry in tables)
            for row, cap in enumerate(caps.tolist())
        )
        bottleneck = replace(terms, hop=np.zeros_like(terms.hop), num_microbatches=1, fill=0.0)
        return cls(tuple(steps), ways, np.zeros_like(terms.tie), bottleneck, whole=True)

    @property
    def end(self) -> int:
        """The last position, and the number of calls."""
        return len(self.least) - 1

    @property
    def last(self) -> int:
        """The node of all devices."""
        return self.steps[-1].target

    def best_way(self, row: int, first: int, last: int) -> int:
        """The way that is best for a stage that holds these calls, and fits.

        For the same calls what ends sooner is never worse, whatever follows.
        """

        def cost(way: Way) -> float:
            if last > way.furthest[first]:
                return np.inf
            work = way.until[last] - way.until[first]
            return float(way.base[first] + self.terms.num_microbatches * work)

        costs = [cost(way) for way in self.ways[row]]
        return costs.index(min(costs))

    def objectives(self, route: Route) -> list[float]:
        """The brackets of the objective, one per stage, without the rounding of long sums."""
        found = []
        elapsed = 0.0
        edges = pairwise([0, *route.cuts, self.end])
        for (first, last), step, number in zip(edges, route.steps, route.ways, strict=True):
            way = self.ways[step.row][number]
            work = float(way.each[first:last].sum())
            found.append(elapsed + float(way.base[first]) + self.terms.num_microbatches * work)
            elapsed += self.terms.fill * work + float(self.terms.hop[step.stage, last])
        return found


def _until(numbers: Floats) -> Floats:
    """(n + 1): for every position, the sum of all numbers before it."""
    return np.concatenate([[0.0], np.cumsum(numbers)])


def _tables(variant: Variant) -> tuple[Floats, Floats, Floats]:
    """Its seconds, memory and entry as arrays; bytes are whole, so that their sums are exact."""
    rows, calls = np.shape(variant.seconds)
    return (
        np.asarray(variant.seconds, dtype=np.float64),
        np.ceil(checked("memory", variant.memory, (rows, calls))),
        np.ceil(checked("entry", variant.entry, (rows, calls + 1))),
    )
