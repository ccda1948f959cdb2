"""The best partition over devices of few kinds, in whichever order suits.

For devices of which many are alike only matters how many of each kind come before a stage, not
which. These counts are the nodes of the line (`penstock.plan.line`), so the sweep that is exact for
one order is exact over all of them, at the cost of `(count + 1)` multiplied over the kinds instead
of `p + 1`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.errors import InputError, PlanError
from penstock.plan.call_costs import (
    Allowed,
    Costs,
    Floats,
    Terms,
    Variant,
    as_variants,
    checked_caps,
)
from penstock.plan.line import Step
from penstock.plan.partition import Partition, solve

MOST_NODES = 4096
"""How many ways to have used the devices are looked at; that many of three kinds take seconds."""


def partition_any_order(
    costs: Costs,
    counts: Sequence[int],
    *,
    num_microbatches: int,
    fill: float = 1.0,
    latency: Floats | None = None,
    allowed: Allowed | None = None,
    tie: Floats | None = None,
    caps: Sequence[float] | Floats | None = None,
) -> Partition:
    """The best of `partition` over every order of the devices.

    Args:
        costs: (kinds, n), as of `partition` with a row per kind of device. The memory and entry of
            variants may have an axis for the stage, as what is in flight depends on it:
            (kinds, p, n) and (kinds, p, n + 1).
        counts: (kinds,); how many devices there are of each kind. `p` is their sum.
        num_microbatches: as of `partition`.
        fill: as of `partition`.
        latency: (n + 1), or (p - 1, n + 1) where it depends on how many stages come before. A link
            that depends on the kinds of its ends is not among what this is exact for.
        allowed: as of `partition`.
        tie: as of `partition`.
        caps: (kinds,); the bytes of memory of a device of each kind. Default no limit.

    Returns:
        the partition; its `devices` are the kinds of the stages.

    Raises:
        PlanError: fewer calls or allowed cuts than `p` stages need, or more than `MOST_NODES` ways
            to have used the devices.
        CapacityError: no partition in any order fits the memory.
        InputError: an array of the wrong shape, or a number that is negative or not finite.
    """
    variants = as_variants(costs)
    kinds, calls = variants[0].seconds.shape
    _check_counts(counts, kinds)
    stages = sum(counts)
    terms = Terms.of(
        stages,
        calls,
        num_microbatches=num_microbatches,
        fill=fill,
        latency=latency,
        allowed=allowed,
        tie=tie,
    )
    rows = [_by_stage(variant, stages) for variant in variants]
    return solve(rows, np.repeat(checked_caps(caps, kinds), stages), _lattice(counts), terms)


def _check_counts(counts: Sequence[int], kinds: int) -> None:
    if len(counts) != kinds:
        raise InputError(
            f"there are costs of {kinds} kinds of devices, but counts has {len(counts)} entries"
        )
    if min(counts) < 0 or sum(counts) < 1:
        raise InputError(f"counts={list(counts)}: give at least one device, and none below zero")
    nodes = math.prod(count + 1 for count in counts)
    if nodes > MOST_NODES:
        raise PlanError(
            f"counts={list(counts)} can be used up in {nodes} ways, and at most {MOST_NODES} are "
            "looked at: call nearly alike devices one kind, or give an order (`partition`)"
        )


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
