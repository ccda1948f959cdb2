"""The problem of the partition: what it is given, checked, and the form in which it is solved.

Stages are filled from the first to the last. A *node* says which devices have been used: for
devices in a given order it is their number; for devices of few kinds, how many of each. A *step*
from one node to a later one adds a stage on a device. A *state* is a node and a position: the
devices of the node hold the calls before the position. Positions run from 0 to n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError, PlanError

Floats = NDArray[np.float64]
Allowed = Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Variant:
    """One variant to run a stage: keeping everything for the backward, say, or recomputing it.

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
        hop: (p, n + 1); what crossing a boundary after stage `s` adds to the elapsed time: its
            latency there and back, weighted by `fill`.
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
        check_feasible(stages, calls, int(usable.sum()))
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


def check_feasible(stages: int, calls: int, cuts: int) -> None:
    """Raise unless there are enough calls, and enough places to cut, for so many stages.

    Raises:
        PlanError: there are not.
    """
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


# -- as it is solved ----------------------------------------------------------------------


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
class DeviceCosts:
    """A variant on one device, summed up for the solver.

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
    def of(cls, seconds: Floats, memory: Floats, entry: Floats, cap: float) -> DeviceCosts:
        """Sum up the costs of one variant on one device.

        Args:
            seconds: (n,); the seconds of every call.
            memory: (n,); the bytes that every call holds.
            entry: (n + 1); the bytes that a stage holds besides because it begins with call `k`.
            cap: the bytes that the device has.
        """
        until, held = _until(seconds), _until(memory)
        reach = np.searchsorted(held, held + (cap - entry), side="right") - 1
        furthest = np.maximum(reach, np.arange(len(held)))
        return cls(seconds, until, furthest, np.broadcast_to(np.float64(0), held.shape))

    @classmethod
    def of_bytes(cls, memory: Floats, entry: Floats, cap: float) -> DeviceCosts:
        """The same with the roles exchanged: the objective is the bytes beyond the cap."""
        until = _until(memory)
        return cls(memory, until, np.full(until.shape, len(memory)), entry - cap)


class Route(NamedTuple):
    """A path through the nodes: where to cut, and every stage's step and number of its variant."""

    cuts: tuple[int, ...]
    steps: tuple[Step, ...]
    variants: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """Every way in which a stage can be added, and what is asked.

    Attributes:
        steps: by ascending source.
        variants: the variants of every row of the costs.
        least: (n + 1); the seconds of all calls before position `k`, each on its fastest row.
        terms: the rest.
        whole: objectives are whole numbers, and limits have to be, for sums to be exact.
    """

    steps: tuple[Step, ...]
    variants: tuple[tuple[DeviceCosts, ...], ...]
    least: Floats
    terms: Terms
    whole: bool = False

    @classmethod
    def of(
        cls, variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
    ) -> Problem:
        """The problem of minimising seconds within the caps.

        Raises:
            InputError: memory or entry of the wrong shape, or not finite, or negative.
        """
        tables = [_tables(variant) for variant in variants]
        on_devices = tuple(
            tuple(
                DeviceCosts.of(s[row], memory[row], entry[row], cap) for s, memory, entry in tables
            )
            for row, cap in enumerate(caps.tolist())
        )
        fastest = np.min([s.min(axis=0) for s, _, _ in tables], axis=0)
        return cls(tuple(steps), on_devices, _until(fastest), terms)

    @classmethod
    def of_bytes(
        cls, variants: Sequence[Variant], caps: Floats, steps: Sequence[Step], terms: Terms
    ) -> Problem:
        """The problem of minimising the bytes by which a device exceeds its cap.

        A bottleneck in bytes instead of seconds, without any elapsed time.
        """
        tables = [_tables(variant) for variant in variants]
        on_devices = tuple(
            tuple(DeviceCosts.of_bytes(memory[row], entry[row], cap) for _, memory, entry in tables)
            for row, cap in enumerate(caps.tolist())
        )
        bottleneck = replace(terms, hop=np.zeros_like(terms.hop), num_microbatches=1, fill=0.0)
        return cls(tuple(steps), on_devices, np.zeros_like(terms.tie), bottleneck, whole=True)

    @property
    def end(self) -> int:
        """The last position, and the number of calls."""
        return len(self.least) - 1

    @property
    def last(self) -> int:
        """The node of all devices."""
        return self.steps[-1].target

    @cached_property
    def is_limited(self) -> bool:
        """Whether any stage may have to end before the last call."""
        every = chain.from_iterable(self.variants)
        return any(bool((costs.furthest < self.end).any()) for costs in every)

    @property
    def most(self) -> float:
        """What no value of the objective exceeds, if all stages may be of any length."""
        every = list(chain.from_iterable(self.variants))
        slowest = _until(np.max([costs.each for costs in every], axis=0))[-1]
        hops = self.terms.hop.max(axis=1).sum()
        base = max(float(costs.base.max()) for costs in every)
        return float((self.terms.num_microbatches + self.terms.fill) * slowest + hops + base)

    @cached_property
    def shut_within(self) -> Floats:
        """(n + 1): inf where no cut may be, else zero."""
        return np.where(self.terms.usable, 0.0, np.inf)

    @cached_property
    def shut_at_last(self) -> Floats:
        """(n + 1): zero at the end, where the last stage ends, else inf."""
        shut = np.full(self.end + 1, np.inf)
        shut[-1] = 0.0
        return shut

    def best_variant(self, row: int, first: int, last: int) -> int:
        """The variant that is best for a stage that holds these calls, and fits.

        For the same calls what ends sooner is never worse, whatever follows.
        """

        def cost(variant: DeviceCosts) -> float:
            if last > variant.furthest[first]:
                return np.inf
            work = variant.until[last] - variant.until[first]
            return float(variant.base[first] + self.terms.num_microbatches * work)

        costs = [cost(variant) for variant in self.variants[row]]
        return costs.index(min(costs))

    def objectives(self, route: Route) -> list[float]:
        """The brackets of the objective, one per stage, without the rounding of long sums."""
        found = []
        elapsed = 0.0
        edges = pairwise([0, *route.cuts, self.end])
        for (first, last), step, number in zip(edges, route.steps, route.variants, strict=True):
            variant = self.variants[step.row][number]
            work = float(variant.each[first:last].sum())
            found.append(elapsed + float(variant.base[first]) + self.terms.num_microbatches * work)
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
