"""The best contiguous partition of a list of calls over an ordered list of devices.

Exact, for unequal devices, latencies and forbidden cuts, in `O(n log n)` per stage and probe:

1. A *state* is "the first `d` stages hold the first `k` calls". For a given limit on the
   objective the smallest elapsed time of a state is never worse than a larger one, because
   whatever follows only gets later. So one forward pass of minima tells whether a limit can be
   met (`_sweep`).
2. Every limit between two neighbouring values of the objective gives the same pass, so a
   bisection that jumps to those values ends at the optimum itself (`_least_limit`).
3. Among the partitions that meet the optimum a best-first search from the end finds the one of
   the smallest boundaries (`_lightest_cuts`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError, PlanError

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""Objectives that differ by less than this share of them count as equal."""


@dataclass(frozen=True)
class Partition:
    """Where to cut.

    Attributes:
        cuts: `p - 1` ascending positions; stage `s` is `calls[cuts[s - 1]:cuts[s]]`.
        objective: what was minimised, in seconds.
    """

    cuts: tuple[int, ...]
    objective: float


def partition(
    seconds: Floats,
    *,
    num_microbatches: int,
    fill: float = 1.0,
    latency: Floats | None = None,
    allowed: Sequence[bool] | NDArray[np.bool_] | None = None,
    tie: Floats | None = None,
) -> Partition:
    """Cuts `n` calls into `p` stages of at least one call each, stage `s` on device `s`.

    Minimises, over all such partitions, with `T_s` the seconds of stage `s` and `c_s` those of the
    boundary after it,

        max over s of [ fill * (sum over i < s of (T_i + 2 c_i))  +  m T_s ]

    With `fill=1` that is the lower bound of the step (`penstock.plan.bound`), with `fill=0` the
    bottleneck.

    Args:
        seconds: (p, n); the forward and backward seconds of call `i` per micro-batch on device `d`.
        num_microbatches: `m`.
        fill: the weight of the time that the pipeline takes to fill and drain.
        latency: (n + 1); the one-way seconds of the boundary of a cut before call `k`. Default 0.
        allowed: (n + 1); whether a cut before call `k` is allowed. Default everywhere. The first
            and the last entry of this and the other boundary arrays are not used.
        tie: (n + 1); the bytes of the boundary of a cut before call `k`. Partitions whose
            objectives agree to a relative `TOLERANCE` are decided by the smaller sum of these.

    Raises:
        PlanError: there are fewer calls, or fewer allowed cuts, than `p` stages need.
        InputError: an array of the wrong shape, or a number that is negative or not finite.
    """
    line = _Line.of(seconds, num_microbatches, fill, latency, allowed, tie)
    limit = _least_limit(line)
    # A call that is hopeless on some device would drown the digits of the others in the sums over
    # that device's calls. Being hopeless is all that matters about it.
    hopeless = 2 * limit / num_microbatches
    if 0 < hopeless < np.max(seconds):
        line = replace(line, until=_until(np.minimum(seconds, hopeless)))
        limit = _least_limit(line)
    cuts = _lightest_cuts(line, limit * (1 + TOLERANCE))
    return Partition(cuts, line.objective(cuts))


@dataclass(frozen=True)
class _Line:
    """The problem, in the form in which it is solved. Positions run from 0 to n.

    *Elapsed* time is the weighted part of the objective, before a stage starts.
    """

    until: Floats  # (p, n + 1): seconds[d, :k] summed
    hop: Floats  # (n + 1): elapsed time that crossing the boundary at k adds
    usable: NDArray[np.bool_]  # (n + 1): a cut may lie here
    tie: Floats  # (n + 1)
    num_microbatches: int
    fill: float

    @classmethod
    def of(
        cls,
        seconds: Floats,
        num_microbatches: int,
        fill: float,
        latency: Floats | None,
        allowed: Sequence[bool] | NDArray[np.bool_] | None,
        tie: Floats | None,
    ) -> _Line:
        seconds = np.asarray(seconds, dtype=np.float64)
        if seconds.ndim != 2 or 0 in seconds.shape:
            raise InputError(
                f"seconds must have one row per device and one column per call, "
                f"got the shape {seconds.shape}"
            )
        if num_microbatches < 1:
            raise InputError(f"num_microbatches must be at least 1, got {num_microbatches}")
        stages, calls = seconds.shape
        for name, numbers in (("seconds", seconds), ("fill", np.array(fill))):
            _check_numbers(name, numbers)
        usable = np.ones(calls + 1, bool) if allowed is None else np.array(allowed, dtype=bool)
        if usable.shape != (calls + 1,):
            raise InputError(f"allowed has the shape {usable.shape}, expected ({calls + 1},)")
        usable[[0, -1]] = False
        _check_feasible(stages, calls, int(usable.sum()))
        return cls(
            until=_until(seconds),
            hop=2 * fill * _per_boundary("latency", latency, calls),
            usable=usable,
            tie=_per_boundary("tie", tie, calls),
            num_microbatches=num_microbatches,
            fill=fill,
        )

    @property
    def num_stages(self) -> int:
        return int(self.until.shape[0])

    @property
    def end(self) -> int:
        return int(self.until.shape[1]) - 1

    def objective(self, cuts: Sequence[int]) -> float:
        """What `partition` minimises, for one way to cut."""
        worst = elapsed = 0.0
        edges = [0, *cuts, self.end]
        for stage, (first, last) in enumerate(pairwise(edges)):
            work = float(self.until[stage, last] - self.until[stage, first])
            worst = max(worst, elapsed + self.num_microbatches * work)
            elapsed += self.fill * work + float(self.hop[last])
        return worst


@dataclass(frozen=True)
class _Sweep:
    """What can be reached without any stage exceeding a limit."""

    elapsed: Floats  # (p + 1, n + 1): the smallest of every state, inf where there is none
    ties: Floats  # (p + 1, n + 1): no way to the state has a smaller sum of ties
    accepted: float  # the largest value of the objective that was met and is within the limit
    rejected: float  # the smallest one that was met and is not

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.elapsed[-1, -1]))


def _sweep(line: _Line, limit: float) -> _Sweep:
    """From left to right, the smallest elapsed time of every state within `limit`."""
    stages, end, m = line.num_stages, line.end, line.num_microbatches
    elapsed = np.full((stages + 1, end + 1), np.inf)
    ties = np.full_like(elapsed, np.inf)
    elapsed[0, 0] = ties[0, 0] = 0.0
    accepted, rejected = 0.0, np.inf
    for stage in range(stages):
        until = line.until[stage]
        starts = np.flatnonzero(np.isfinite(elapsed[stage]))
        if not starts.size:
            break
        begun = elapsed[stage, starts]
        worst = begun - m * until[starts]  # plus m * until[k] is the objective of a stage up to k
        reach = np.searchsorted(until, (limit - worst) / m, side="right") - 1
        reach = np.maximum(reach, starts)

        moved = reach > starts
        accepted = max(accepted, (worst + m * until[reach])[moved].max(initial=0.0))
        more = reach < end
        rejected = min(rejected, (worst[more] + m * until[reach[more] + 1]).min(initial=np.inf))

        ends = line.usable if stage < stages - 1 else np.arange(end + 1) == end
        work = line.fill * until
        least = _least_over(begun - work[starts], starts, reach, end)
        elapsed[stage + 1, ends] = (least + work + line.hop)[ends]
        lightest = _least_over(ties[stage, starts], starts, reach, end)
        ties[stage + 1, ends] = (lightest + line.tie)[ends]
    return _Sweep(elapsed, ties, float(accepted), float(rejected))


def _least_over(
    values: Floats, starts: NDArray[np.intp], reach: NDArray[np.intp], end: int
) -> Floats:
    """`out[k]` is the smallest `values[i]` with `starts[i] < k <= reach[i]`, inf without any.

    Every range is the union of two blocks whose length is a power of two. They are entered in the
    table of that length, and handed down to the halves of the block until the length is one.
    """
    some = reach > starts
    values, first, last = values[some], starts[some] + 1, reach[some]
    levels = np.frexp(last - first + 1)[1] - 1
    table: Floats = np.full((int(levels.max(initial=0)) + 1, end + 1), np.inf)
    np.minimum.at(table, (levels, first), values)
    np.minimum.at(table, (levels, last + 1 - (1 << levels)), values)
    for level in range(len(table) - 1, 0, -1):
        half = 1 << (level - 1)
        np.minimum(table[level - 1], table[level], out=table[level - 1])
        np.minimum(table[level - 1, half:], table[level, :-half], out=table[level - 1, half:])
    out: Floats = table[0]
    return out


def _least_limit(line: _Line) -> float:
    """The optimum: the smallest limit that can be met."""
    most = (line.fill + line.num_microbatches) * line.until[:, -1].sum() + line.hop.sum()
    low, high = 0.0, _sweep(line, 2 * float(most)).accepted
    while math.nextafter(low, math.inf) < high:
        limit = (low + high) / 2
        sweep = _sweep(line, limit)
        if sweep.feasible:
            high = min(limit, sweep.accepted)
        else:
            low = max(math.nextafter(limit, math.inf), sweep.rejected)
    return high


def _lightest_cuts(line: _Line, limit: float) -> tuple[int, ...]:
    """The cuts of the smallest sum of ties that keep within `limit`.

    Best first, from the last stage to the first. A label is a choice of the later cuts. It carries
    the sum of their ties and its *allowance*, the elapsed time that a state may have when they
    follow. A state whose smallest elapsed time is within the allowance can be completed, so the
    search never runs into a dead end, and the sweep's ties are a bound that guides it.
    """
    sweep = _sweep(line, limit)
    m, stages = line.num_microbatches, line.num_stages
    largest: dict[tuple[int, int], float] = {}
    heap: list[tuple[float, int, float, tuple[int, ...]]] = [(0.0, stages, -math.inf, (line.end,))]
    while True:
        _, stage, allowance, edges = heapq.heappop(heap)
        allowance, last = -allowance, edges[0]
        if stage == 0:
            return edges[1:-1]
        # Labels of one state come in the order of their ties, so only more allowance is news.
        if allowance <= largest.get((stage, last), -math.inf):
            continue
        largest[stage, last] = allowance
        stage -= 1
        work = line.until[stage, last] - line.until[stage, :last]
        rest = np.minimum(limit - m * work, allowance - line.fill * work - line.hop[last])
        ties = float(line.tie[list(edges)].sum())
        for first in np.flatnonzero(sweep.elapsed[stage, :last] <= rest).tolist():
            bound = ties + float(sweep.ties[stage, first])
            heapq.heappush(heap, (bound, stage, -float(rest[first]), (first, *edges)))


def _until(seconds: Floats) -> Floats:
    """(p, n + 1): for every position, the seconds of all calls before it."""
    return np.concatenate([np.zeros((len(seconds), 1)), seconds.cumsum(axis=1)], axis=1)


def _check_numbers(name: str, numbers: Floats) -> None:
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise InputError(f"{name} must be finite and not negative, got {numbers.min()}")


def _per_boundary(name: str, numbers: Floats | None, calls: int) -> Floats:
    """`numbers` as an array of one number per position, zero by default and at both ends."""
    if numbers is None:
        return np.zeros(calls + 1)
    array = np.array(numbers, dtype=np.float64)
    if array.shape != (calls + 1,):
        raise InputError(f"{name} has the shape {array.shape}, expected ({calls + 1},)")
    array[[0, -1]] = 0.0
    _check_numbers(name, array)
    return array


def _check_feasible(stages: int, calls: int, cuts: int) -> None:
    if stages > calls:
        raise PlanError(
            f"{stages} stages need at least {stages} calls, but the program has {calls}; "
            f"use at most {calls} devices, or open more modules"
        )
    if cuts < stages - 1:
        raise PlanError(
            f"{stages} stages need {stages - 1} cuts, but only {cuts} of the {calls - 1} "
            f"positions between the {calls} calls allow one; use at most {cuts + 1} devices"
        )
