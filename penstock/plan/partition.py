"""The best contiguous partition of a list of calls over devices, in a given or in any order.

Exact, for unequal devices, memory caps, link costs, forbidden cuts and several variants of every
stage; `penstock.plan.solver` says how. If many devices are alike, only how many of each kind come
before a stage matters, not which. These counts are then the nodes of the problem, so the
sweep that is exact for one order is exact over all of them, at the cost of `(count + 1)` multiplied
over the kinds instead of `p + 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.errors import InputError, PlanError
from penstock.plan.problem import (
    Allowed,
    Costs,
    Floats,
    Problem,
    Route,
    Step,
    Terms,
    Variant,
    as_variants,
    checked_caps,
)
from penstock.plan.solver import TOLERANCE, least_limit, lightest_route
from penstock.units import show_bytes

_DROWNING = 100.0
"""If a call takes this many times as long as a hopeless one, it is clipped to keep sums precise."""

_MOST_NODES = 4096
"""How many ways to have used the devices are looked at; that many of three kinds take seconds."""


@dataclass(frozen=True)
class Partition:
    """Where to cut.

    Attributes:
        cuts: `p - 1` ascending positions; stage `s` is `calls[cuts[s - 1]:cuts[s]]`.
        objective: what was minimised, in seconds.
        variants: for every stage the number of the variant that it is run in.
        devices: for every stage the number of its device, or of the kind of its device.
    """

    cuts: tuple[int, ...]
    objective: float
    variants: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Shortfall:
    """By how much the memory is too small, and for what.

    Attributes:
        bytes: the least that would have to be added to the memory of every device.
        partition: fits if that is added; its `objective` is these bytes.
        stage: the tightest stage of that partition: it needs all of what is added.
        calls: the first call of that stage, and the one after the last.
        device: the number of its device, or of the kind of its device.
        needed: the bytes that the stage takes there.
    """

    bytes: float
    partition: Partition
    stage: int
    calls: tuple[int, int]
    device: int
    needed: float


class CapacityError(PlanError):
    """The program does not fit the memory of the devices, however it is cut.

    The shortfall is computed only when it is read, as planning tries much that does not fit.

    Args:
        find: computes the shortfall.
    """

    def __init__(self, find: Callable[[], Shortfall]) -> None:
        super().__init__("the program does not fit")
        self._find = find

    @cached_property
    def shortfall(self) -> Shortfall:
        """How many bytes are missing, and in which calls; it is found when somebody asks."""
        return self._find()

    def __str__(self) -> str:
        shortfall = self.shortfall
        first, last = shortfall.calls
        have = shortfall.needed - shortfall.bytes
        return (
            f"the program does not fit: every device would need {show_bytes(shortfall.bytes)} "
            f"more ({shortfall.bytes:.0f} bytes). Cut as well as possible, stage {shortfall.stage} "
            f"(calls {first} to {last - 1}) takes {show_bytes(shortfall.needed)}, and its device "
            f"has {show_bytes(have)}; use more devices, devices with more memory, smaller "
            "micro-batches or recompute"
        )


def partition(
    costs: Costs,
    *,
    num_microbatches: int,
    fill: float = 1.0,
    latency: Floats | None = None,
    allowed: Allowed | None = None,
    tie: Floats | None = None,
    caps: Sequence[float] | Floats | None = None,
    counts: Sequence[int] | None = None,
) -> Partition:
    """Cut `n` calls into `p` stages of at least one call each, stage `s` on device `s`.

    Minimises, over all such partitions that fit the memory, with `T_s` the seconds of stage `s`
    and `c_s` those of the boundary after it,

        max over s of [ fill * (sum over i < s of (T_i + 2 c_i))  +  m T_s ]

    With `fill=1` that is the lower bound of the step (`penstock.plan.bound`), with `fill=0` the
    bottleneck.

    Args:
        costs: (p, n); the forward and backward seconds of call `i` per micro-batch on device `d`.
            Or variants: every stage then takes the fastest one that fits, of equals the first.
        num_microbatches: `m`.
        fill: the weight of the time that the pipeline takes to fill and drain.
        latency: (n + 1); the one-way seconds of the boundary of a cut before call `k`. Or
            (p - 1, n + 1), where they depend on the link. Default 0.
        allowed: (n + 1); whether a cut before call `k` is allowed. Default everywhere. The first
            and the last entry of this and the other boundary arrays are not used.
        tie: (n + 1); the bytes of the boundary of a cut before call `k`. Partitions whose
            objectives agree to a relative `TOLERANCE` are decided by the smaller sum of these.
        caps: (p,); the bytes of memory of each device, whole ones. Default no limit.
        counts: (kinds,); how many devices there are of each kind, to be put into the best of all
            orders. `p` is their sum. Rows of `costs` and `caps` are then about kinds, and the
            memory and entry of variants may have an axis for the stage, as what is in flight
            depends on it: (kinds, p, n) and (kinds, p, n + 1). For a `latency` that depends on the
            kinds of a link's ends the result is not exact. Default: the devices in their order.

    Returns:
        the partition; with `counts` its `devices` are the kinds of the stages.

    Raises:
        PlanError: there are fewer calls, or fewer allowed cuts, than `p` stages need, or more than
            `_MOST_NODES` ways to have used the devices.
        CapacityError: no partition fits the memory.
        InputError: an array of the wrong shape, or a number that is negative or not finite.
    """
    variants = as_variants(costs)
    rows, calls = variants[0].seconds.shape
    stages = rows if counts is None else _checked_sum(counts, rows)
    terms = Terms.of(
        stages,
        calls,
        num_microbatches=num_microbatches,
        fill=fill,
        latency=latency,
        allowed=allowed,
        tie=tie,
    )
    limits = checked_caps(caps, rows)
    if counts is None:
        return _solve(variants, limits, _chain(stages), terms)
    spread = [_by_stage(variant, stages) for variant in variants]
    return _solve(spread, np.repeat(limits, stages), _lattice(counts), terms)


def _solve(
    variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
) -> Partition:
    """The best partition along some steps.

    Raises:
        CapacityError: none fits the memory.
        InputError: memory or entry of the wrong shape, or a number negative or not finite.
    """
    problem = Problem.of(variants, caps, steps, terms)
    limit = least_limit(problem)
    if math.isinf(limit):
        raise CapacityError(lambda: _shortfall(variants, caps, steps, terms))
    # A call that is hopeless on some device would drown the digits of the others in the sums over
    # that device's calls. Being hopeless is all that matters about it.
    clear, hopeless = problem, 2 * limit / terms.num_microbatches
    if 0 < _DROWNING * hopeless < max(float(np.max(variant.seconds)) for variant in variants):
        clipped = [replace(v, seconds=np.minimum(v.seconds, hopeless)) for v in variants]
        clear = Problem.of(clipped, caps, steps, terms)
        limit = least_limit(clear)
    return _described(problem, lightest_route(clear, limit * (1 + TOLERANCE)))


def _shortfall(
    variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
) -> Shortfall:
    """By how much the memory is too small for every partition along some steps."""
    problem = Problem.of_bytes(variants, caps, steps, terms)
    limit = least_limit(problem)
    route = lightest_route(problem, limit)
    over = problem.objectives(route)
    stage = over.index(max(over))
    edges = list(pairwise([0, *route.cuts, problem.end]))
    step = route.steps[stage]
    return Shortfall(
        bytes=limit,
        partition=_described(problem, route),
        stage=stage,
        calls=edges[stage],
        device=step.device,
        needed=over[stage] + float(caps[step.row]),
    )


def _described(problem: Problem, route: Route) -> Partition:
    return Partition(
        cuts=route.cuts,
        objective=max(problem.objectives(route)),
        variants=route.variants,
        devices=tuple(step.device for step in route.steps),
    )


def _chain(stages: int) -> list[Step]:
    """The steps of devices in a given order: a chain of nodes."""
    return [Step(s, s + 1, row=s, device=s, stage=s) for s in range(stages)]


def _checked_sum(counts: Sequence[int], kinds: int) -> int:
    """The number of devices, of so many of each kind."""
    if len(counts) != kinds:
        raise InputError(
            f"there are costs of {kinds} kinds of devices, but counts has {len(counts)} entries"
        )
    if min(counts) < 0 or sum(counts) < 1:
        raise InputError(f"counts={list(counts)}: give at least one device, and none below zero")
    nodes = math.prod(count + 1 for count in counts)
    if nodes > _MOST_NODES:
        raise PlanError(
            f"counts={list(counts)} can be used up in {nodes} ways, and at most {_MOST_NODES} are "
            "looked at: call nearly alike devices one kind, or give an order"
        )
    return sum(counts)


def _by_stage(variant: Variant, stages: int) -> Variant:
    """The variant with a row for every kind at every stage, the stages of a kind together."""

    def spread(numbers: Floats | None) -> Floats | None:
        if numbers is None:
            return None
        array = np.asarray(numbers, dtype=np.float64)
        if array.ndim == 2:
            array = np.repeat(array[:, None], stages, axis=1)
        if array.ndim != 3 or array.shape[1] != stages:
            raise InputError(
                f"the memory of a variant has the shape {array.shape}, expected one row per kind, "
                f"or one per kind and each of the {stages} stages"
            )
        return array.reshape(-1, array.shape[-1])

    seconds = np.repeat(np.asarray(variant.seconds, dtype=np.float64), stages, axis=0)
    return Variant(seconds, spread(variant.memory), spread(variant.entry))


def _lattice(counts: Sequence[int]) -> list[Step]:
    """One more device of any kind, from every way to have used some of them."""
    stages = sum(counts)
    shape = [count + 1 for count in counts]
    strides = [math.prod(shape[kind + 1 :]) for kind in range(len(shape))]
    return [
        Step(
            node, node + strides[kind], row=kind * stages + sum(used), device=kind, stage=sum(used)
        )
        for node, used in enumerate(np.ndindex(*shape))
        for kind in range(len(shape))
        if used[kind] < counts[kind]
    ]
