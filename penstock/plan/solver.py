"""Solving the problem: the least limit that can be met, and the lightest cuts that meet it.

Exact, in `O(n log n)` per step, variant and probe:

1. For a given limit on the objective the smallest elapsed time of a state is never worse than a
   larger one, because whatever follows only gets later. Where a stage must end, for the limit as
   for the memory, only depends on where it begins and when. So one forward pass of minima tells
   whether a limit can be met (`_sweep`).
2. Every limit between two neighbouring values of the objective gives the same pass, so a
   bisection that jumps to those values ends at the optimum itself (`least_limit`). Values that
   lie beyond what memory allows are no such values: no limit makes them possible.
3. A stage begins no earlier than the calls before it can be done on their fastest devices. Even
   if it begins then, and is filled to the limit, it reaches back from its end only to some
   position. Positions that a chain of such stages from the end does not reach are left out
   (`_earliest`), and a limit for which it does not reach the beginning cannot be met.
4. Among the partitions that meet the optimum a best-first search from the end finds the one of
   the smallest boundaries (`lightest_route`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.plan.problem import DeviceCosts, Floats, Problem, Route, Step

Positions = NDArray[np.intp]

TOLERANCE = 1e-9
"""Objectives that differ by less than this share of them count as equal."""


@dataclass(frozen=True, eq=False)
class _Sweep:
    """What can be reached without any stage exceeding a limit."""

    elapsed: Floats  # (nodes, n + 1): the smallest of every state, inf where there is none
    accepted: float  # the largest value of the objective that was met and is within the limit
    rejected: float  # the smallest value that was met, fits the memory, and exceeds the limit

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.elapsed[-1, -1]))


def least_limit(problem: Problem) -> float:
    """The optimum: the smallest limit that can be met, or inf if memory allows none."""
    high = problem.most
    if problem.is_limited:
        unlimited = _sweep(problem, math.inf, np.zeros(problem.last + 1, np.intp))
        if not unlimited.feasible:
            return math.inf
        high = unlimited.accepted
    low = _too_low(problem, high)
    stride = low / 1024 or high
    earliest = _earliest(problem, high)
    limit = min(low + stride, (low + high) / 2)
    while math.nextafter(low, math.inf) < high:
        limit = math.floor(limit) if problem.whole else limit
        sweep = _sweep(problem, limit, earliest)
        jumped = False
        if sweep.feasible:
            high = min(limit, sweep.accepted)
            earliest = _earliest(problem, high)
        else:
            low = max(math.nextafter(limit, math.inf), sweep.rejected)
            jumped = low > limit + stride
            stride *= 4
        # What lies far beyond a limit may be a call on which all depends: the optimum itself.
        limit = low if jumped else min(low + stride, (low + high) / 2)
    return high


def _too_low(problem: Problem, high: float) -> float:
    """A limit that cannot be met, or zero; close to the least if stages could divide calls."""
    low = 0.0
    for _ in range(60):
        limit = (low + high) / 2
        if _earliest(problem, limit)[0] > 0:
            low = limit
        else:
            high = limit
        if high - low <= low / 1024:
            break
    return low


def _earliest(problem: Problem, limit: float) -> Positions:
    """(nodes,): at no smaller position can a state be completed within `limit`.

    From the end, every stage takes the most calls that it could if its elapsed time were that of
    its calls on their fastest devices. Beyond the end where nothing can be completed.
    """
    m, end = problem.terms.num_microbatches, problem.end
    # Weighing elapsed time less than it counts is safe, and keeps `lag` ascending.
    begun = min(problem.terms.fill, m) * problem.least
    room = limit * (1 + TOLERANCE)
    earliest = np.full(problem.last + 1, end + 1)
    earliest[-1] = end
    for step in reversed(problem.steps):
        last = int(earliest[step.target])
        if last > end:
            continue
        for variant in problem.variants[step.row]:
            lag = m * variant.until[: last + 1] - begun[: last + 1]
            must = m * variant.until[last] + variant.base.min() - room
            earliest[step.source] = min(earliest[step.source], np.searchsorted(lag, must))
    return earliest


def _sweep(problem: Problem, limit: float, earliest: Positions) -> _Sweep:
    """From left to right, the smallest elapsed time of every state within `limit`."""
    m, fill = problem.terms.num_microbatches, problem.terms.fill
    elapsed = np.full((problem.last + 1, problem.end + 1), np.inf)
    elapsed[0, 0] = 0.0
    accepted, rejected = 0.0, np.inf
    for step, starts in _open_steps(problem, elapsed):
        begun = elapsed[step.source, starts]
        shut, hop = _shut(problem, step), problem.terms.hop[step.stage]
        for variant in problem.variants[step.row]:
            until, furthest = variant.until, variant.furthest[starts]
            worst = begun + variant.base[starts] - m * until[starts]
            reach = _reach(variant, m, worst, starts, limit)
            met = np.where(reach > starts, worst + m * until[reach], 0.0)
            accepted = max(accepted, met.max())
            beyond = worst + m * until[np.minimum(reach + 1, furthest)]
            rejected = min(rejected, np.where(reach < furthest, beyond, np.inf).min())

            left, least = _least_over(begun - fill * until[starts], starts, reach)
            skipped = max(0, int(earliest[step.target]) - left)
            ends = slice(left + skipped, left + len(least))
            found = least[skipped:] + fill * until[ends] + hop[ends] + shut[ends]
            target = elapsed[step.target, ends]
            np.minimum(target, found, out=target)
    return _Sweep(elapsed, float(accepted), float(rejected))


def _open_steps(problem: Problem, elapsed: Floats) -> Iterator[tuple[Step, Positions]]:
    """The steps that can be taken, with the positions from which."""
    for step in problem.steps:
        starts = (elapsed[step.source] < np.inf).nonzero()[0]
        if starts.size:
            yield step, starts


def _shut(problem: Problem, step: Step) -> Floats:
    """(n + 1): zero where the stage of this step may end, else inf."""
    return problem.shut_within if step.target != problem.last else problem.shut_at_last


def _reach(
    variant: DeviceCosts, m: int, worst: Floats, starts: Positions, limit: float
) -> Positions:
    """How far the stages go that begin at `starts`, where `worst` is what they begin with."""
    within = variant.until.searchsorted((limit - worst) / m, side="right") - 1
    return np.minimum(np.maximum(within, starts), variant.furthest[starts])


def _least_over(values: Floats, starts: Positions, reach: Positions) -> tuple[int, Floats]:
    """For every `k` from the returned position, the least `values[i]`, `starts[i] < k <= reach[i]`.

    Every range is the union of two blocks whose length is a power of two. They are entered in the
    table of that length, and handed down to the halves of the block until the length is one.
    """
    some = reach > starts
    if not some.all():
        values, starts, reach = values[some], starts[some], reach[some]
        if not starts.size:
            return 0, np.empty(0)
    left = int(starts[0]) + 1
    first, last = starts + 1 - left, reach - left
    levels = np.frexp(last - first + 1)[1] - 1
    size = int(last.max()) + 1
    table: Floats = np.full((int(levels.max()) + 1, size), np.inf)
    table[levels, first] = values
    np.minimum.at(table, (levels, last + 1 - (1 << levels)), values)
    for level in range(len(table) - 1, 0, -1):
        half = 1 << (level - 1)
        np.minimum(table[level - 1], table[level], out=table[level - 1])
        np.minimum(table[level - 1, half:], table[level, :-half], out=table[level - 1, half:])
    return left, table[0]


def _least_ties(problem: Problem, elapsed: Floats, limit: float) -> Floats:
    """(nodes, n + 1): no path to the state has a smaller sum of ties."""
    m = problem.terms.num_microbatches
    ties = np.full_like(elapsed, np.inf)
    ties[0, 0] = 0.0
    for step, starts in _open_steps(problem, elapsed):
        begun = elapsed[step.source, starts]
        for variant in problem.variants[step.row]:
            worst = begun + variant.base[starts] - m * variant.until[starts]
            reach = _reach(variant, m, worst, starts, limit)
            left, least = _least_over(ties[step.source, starts], starts, reach)
            ends = slice(left, left + len(least))
            target = ties[step.target, ends]
            np.minimum(target, least + problem.terms.tie[ends], out=target)
    return ties


class _Chain(NamedTuple):
    """The stage of the calls from `first` up to `last`, and the stages after it."""

    first: int
    last: int
    step: Step
    rest: _Chain | None


def lightest_route(problem: Problem, limit: float) -> Route:
    """The route of the smallest sum of ties that keeps within `limit`, which can be met.

    Best first, from the last stage to the first. A label is a choice of the later cuts. It carries
    the sum of their ties and its *allowance*, the elapsed time that a state may have when they
    follow. A state whose smallest elapsed time is within the allowance can be completed, so the
    search never runs into a dead end, and the least ties are a bound that guides it.
    """
    elapsed = _sweep(problem, limit, _earliest(problem, limit)).elapsed
    least = _least_ties(problem, elapsed, limit)
    reached = [np.flatnonzero(np.isfinite(states)) for states in elapsed]
    into: dict[int, list[Step]] = {}
    for step in problem.steps:
        into.setdefault(step.target, []).append(step)
    allowed = np.full_like(elapsed, -np.inf)
    # Bound, node, minus allowance, position, sum of ties, and the chain of what follows.
    heap: list[tuple[float, int, float, int, float, _Chain | None]] = [
        (0.0, problem.last, -math.inf, problem.end, 0.0, None)
    ]
    while True:
        _, node, allowance, last, ties, chain = heapq.heappop(heap)
        allowance = -allowance
        if node == 0:
            return _route(problem, chain)
        # Labels of one state come in the order of their ties, so only more allowance is new.
        if allowance <= allowed[node, last]:
            continue
        allowed[node, last] = allowance
        ties += float(problem.terms.tie[last])
        for step in into[node]:
            source = step.source
            starts = reached[source][: np.searchsorted(reached[source], last)]
            rest = _rest(problem, step, starts, last, limit, allowance)
            is_new = (elapsed[source, starts] <= rest) & (rest > allowed[source, starts])
            for first, more in zip(starts[is_new].tolist(), rest[is_new].tolist(), strict=True):
                bound = ties + float(least[source, first])
                link = _Chain(first, last, step, chain)
                heapq.heappush(heap, (bound, source, -more, first, ties, link))


def _rest(
    problem: Problem, step: Step, starts: Positions, last: int, limit: float, allowance: float
) -> Floats:
    """The allowances of the positions at which the stage that ends at `last` may begin."""
    m, fill = problem.terms.num_microbatches, problem.terms.fill
    allowance -= float(problem.terms.hop[step.stage, last])
    best = np.full(len(starts), -np.inf)
    for variant in problem.variants[step.row]:
        work = variant.until[last] - variant.until[starts]
        rest = np.minimum(limit - variant.base[starts] - m * work, allowance - fill * work)
        np.maximum(best, rest, out=best, where=variant.furthest[starts] >= last)
    return best


def _route(problem: Problem, chain: _Chain | None) -> Route:
    cuts, steps, variants = [], [], []
    while chain is not None:
        first, last, step, chain = chain
        cuts.append(last)
        steps.append(step)
        variants.append(problem.best_variant(step.row, first, last))
    return Route(tuple(cuts[:-1]), tuple(steps), tuple(variants))
