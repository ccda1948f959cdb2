"""The best contiguous partition of a list of calls over an ordered list of devices.

Exact, for unequal devices, memory caps, link costs, forbidden cuts and several variants of every
stage. How is in `penstock.plan.solver`; devices in any order are in `penstock.plan.device_order`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.errors import PlanError
from penstock.plan.call_costs import (
    Allowed,
    Costs,
    Floats,
    Terms,
    Variant,
    as_variants,
    checked_caps,
)
from penstock.plan.line import Line, Route, Step
from penstock.plan.solver import TOLERANCE, least_limit, lightest_route
from penstock.units import show_bytes

__all__ = ["CapacityError", "Partition", "Shortfall", "Variant", "partition", "shortfall"]


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

    Attributes:
        shortfall: by how much, and where.
    """

    def __init__(self, shortfall: Shortfall) -> None:
        self.shortfall = shortfall
        first, last = shortfall.calls
        have = shortfall.needed - shortfall.bytes
        super().__init__(
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
) -> Partition:
    """Cuts `n` calls into `p` stages of at least one call each, stage `s` on device `s`.

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

    Raises:
        PlanError: there are fewer calls, or fewer allowed cuts, than `p` stages need.
        CapacityError: no partition fits the memory.
        InputError: an array of the wrong shape, or a number that is negative or not finite.
    """
    variants = as_variants(costs)
    stages, calls = variants[0].seconds.shape
    terms = Terms.of(
        stages,
        calls,
        num_microbatches=num_microbatches,
        fill=fill,
        latency=latency,
        allowed=allowed,
        tie=tie,
    )
    return solve(variants, checked_caps(caps, stages), _chain(stages), terms)


def shortfall(
    costs: Costs,
    *,
    caps: Sequence[float] | Floats,
    allowed: Allowed | None = None,
    tie: Floats | None = None,
) -> Shortfall | None:
    """By how much the memory is too small for every partition; None if one fits.

    Args:
        costs: as of `partition`; the seconds don't matter.
        caps: (p,); the bytes of memory of each device.
        allowed: as of `partition`.
        tie: as of `partition`.

    Raises:
        PlanError: there are fewer calls, or fewer allowed cuts, than `p` stages need.
        InputError: an array of the wrong shape, or a number that is negative or not finite.
    """
    variants = as_variants(costs)
    stages, calls = variants[0].seconds.shape
    terms = Terms.of(stages, calls, allowed=allowed, tie=tie)
    found = find_shortfall(variants, checked_caps(caps, stages), _chain(stages), terms)
    return found if found.bytes else None


def solve(
    variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
) -> Partition:
    """The best partition along some steps.

    Raises:
        CapacityError: none fits the memory.
        InputError: memory or entry of the wrong shape, or a number negative or not finite.
    """
    line = Line.of(variants, caps, steps, terms)
    limit = least_limit(line)
    if math.isinf(limit):
        raise CapacityError(find_shortfall(variants, caps, steps, terms))
    # A call that is hopeless on some device would drown the digits of the others in the sums over
    # that device's calls. Being hopeless is all that matters about it.
    clear, hopeless = line, 2 * limit / terms.num_microbatches
    if 0 < hopeless < max(float(np.max(variant.seconds)) for variant in variants):
        clipped = [replace(v, seconds=np.minimum(v.seconds, hopeless)) for v in variants]
        clear = Line.of(clipped, caps, steps, terms)
        limit = least_limit(clear)
    return _described(line, lightest_route(clear, limit * (1 + TOLERANCE)))


def find_shortfall(
    variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
) -> Shortfall:
    """What `shortfall` returns, along some steps; of no bytes if a partition fits."""
    line = Line.of_bytes(variants, caps, steps, terms)
    limit = least_limit(line)
    route = lightest_route(line, limit)
    over = line.objectives(route)
    stage = over.index(max(over))
    edges = list(pairwise([0, *route.cuts, line.end]))
    step = route.steps[stage]
    return Shortfall(
        bytes=limit,
        partition=_described(line, route),
        stage=stage,
        calls=edges[stage],
        device=step.device,
        needed=over[stage] + float(caps[step.row]),
    )


def _described(line: Line, route: Route) -> Partition:
    return Partition(
        cuts=route.cuts,
        objective=max(line.objectives(route)),
        variants=route.ways,
        devices=tuple(step.device for step in route.steps),
    )


def _chain(stages: int) -> list[Step]:
    """Devices in a given order."""
    return [Step(s, s + 1, row=s, device=s, stage=s) for s in range(stages)]
