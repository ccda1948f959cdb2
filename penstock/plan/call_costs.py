"""What calls and cuts cost, as the partition takes it: checked arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError, PlanError

Floats = NDArray[np.float64]
Allowed = Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run a stage: keeping everything for the backward, say, or recomputing it.

    The memory of a stage that holds the calls from `a` up to `b` on device `d` is
    `memory[d, a:b].sum() + entry[d, a]`.

    Attributes:
        seconds: (p, n); the forward and backward seconds of call `i` per micro-batch on device `d`.
        memory: (p, n); the bytes that call `i` holds on device `d`, in all micro-batches that are
            in flight there. They are rounded up to whole bytes. Default 0.
        entry: (p, n + 1); the bytes that a stage holds besides because it begins with call `k`.
            The last entry is not used. Default 0.
    """

    seconds: Floats
    memory: Floats | None = None
    entry: Floats | None = None


Costs = Floats | Sequence[Variant]
"""The seconds alone, or the variants of which every stage may use another."""


def as_variants(costs: Costs) -> tuple[Variant, ...]:
    """The variants, with their seconds checked.

    Raises:
        InputError: a wrong shape, or a number that is negative or not finite.
    """
    given: tuple[Variant, ...]
    if isinstance(costs, Sequence) and costs and all(isinstance(v, Variant) for v in costs):
        given = tuple(costs)
    else:
        given = (Variant(np.asarray(costs, dtype=np.float64)),)
    shape = np.shape(given[0].seconds)
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"seconds must have one row per device and one column per call, got the shape {shape}"
        )
    for variant in given:
        checked("seconds", variant.seconds, shape)
    return given


def checked(name: str, numbers: Floats | None, shape: tuple[int, ...]) -> Floats:
    """The numbers, or zeros, as an array of this shape.

    Raises:
        InputError: a wrong shape, or a number that is negative or not finite.
    """
    if numbers is None:
        return np.broadcast_to(np.float64(0), shape)
    array = np.asarray(numbers, dtype=np.float64)
    if array.shape != shape:
        raise InputError(f"{name} has the shape {array.shape}, expected {shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise InputError(f"{name} must be finite and not negative, got {array.min()}")
    return array


def checked_caps(caps: Sequence[float] | Floats | None, devices: int) -> Floats:
    """(devices,): the bytes of every device, without a limit by default.

    Raises:
        InputError: not one number per device, or one that is negative or not a number.
    """
    array = np.full(devices, np.inf) if caps is None else np.asarray(caps, dtype=np.float64)
    if array.shape != (devices,):
        raise InputError(f"caps has the shape {array.shape}, expected ({devices},)")
    if not (array >= 0).all():
        raise InputError(f"caps must not be negative, got {array.min()}; use inf for no limit")
    whole: Floats = np.floor(array)
    return whole


@dataclass(frozen=True)
class Terms:
    """What a partition is asked for, besides the costs of calls: checked.

    Attributes:
        hop: (p, n + 1); elapsed time that crossing a boundary after stage `s` adds.
        usable: (n + 1); a cut may lie here.
        tie: (n + 1); what a cut here adds to the sum that decides between equals.
        num_microbatches: `m`.
        fill: the weight of the time that the pipeline takes to fill and drain.
    """

    hop: Floats
    usable: NDArray[np.bool_]
    tie: Floats
    num_microbatches: int
    fill: float

    @classmethod
    def of(
        cls,
        stages: int,
        calls: int,
        *,
        num_microbatches: int = 1,
        fill: float = 0.0,
        latency: Floats | None = None,
        allowed: Allowed | None = None,
        tie: Floats | None = None,
    ) -> Terms:
        """Check what `partition` was given.

        Raises:
            PlanError: there are fewer calls, or fewer allowed cuts, than the stages need.
            InputError: an array of the wrong shape, or a number that is negative or not finite.
        """
        if num_microbatches < 1:
            raise InputError(f"num_microbatches must be at least 1, got {num_microbatches}")
        checked("fill", np.array(fill), ())
        usable = np.ones(calls + 1, bool) if allowed is None else np.array(allowed, dtype=bool)
        if usable.shape != (calls + 1,):
            raise InputError(f"allowed has the shape {usable.shape}, expected ({calls + 1},)")
        usable[[0, -1]] = False
        _check_feasible(stages, calls, int(usable.sum()))
        crossing = _inner(latency)
        if crossing is None or crossing.ndim != 2:
            crossing = np.broadcast_to(
                checked("latency", crossing, (calls + 1,)), (stages, calls + 1)
            )
        else:
            crossing = checked("latency", crossing, (stages - 1, calls + 1))
            crossing = np.concatenate([crossing, np.zeros((1, calls + 1))])
        return cls(
            hop=2 * fill * crossing,
            usable=usable,
            tie=checked("tie", _inner(tie), (calls + 1,)),
            num_microbatches=num_microbatches,
            fill=fill,
        )


def _inner(numbers: Floats | None) -> Floats | None:
    """A copy in which the two ends, where there is no cut, are zero."""
    if numbers is None:
        return None
    array = np.array(numbers, dtype=np.float64)
    if array.ndim:
        array[..., :1] = array[..., -1:] = 0.0
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
