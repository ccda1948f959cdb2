"""One way to run a program: its stages and a schedule, and what they are predicted to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from penstock.plan.bound import schedule_bound
from penstock.plan.cutting import Cutter
from penstock.plan.decisions import Candidate, StagePlan
from penstock.plan.fit import Room, fit
from penstock.plan.layout import Layout, Memory, Span, Stretch
from penstock.plan.partition import partition
from penstock.plan.plan import Plan
from penstock.schedule import (
    SCHEDULES,
    Rules,
    Schedule,
    StagesPerWorker,
    build,
    check,
    placement_of,
)
from penstock.simulate import Simulator

# In order of preference among equals: what is simplest and holds least, first.
PREFERENCE = (
    *("1f1b", "eager-1f1b", "gpipe", "naive", "fitted"),
    *("zero-bubble", "interleaved", "breadth-first", "zero-bubble-v"),
)

STAGES_PER_WORKER = 2
"""Where a schedule takes any number, and none is asked for."""

UNLIKELY = 1.3
"""What is estimated to take so many times as long is not expected to turn out faster."""

EQUAL = 1.002
"""Predictions that are closer than this say nothing."""

_FILLS = (0.5, 1.0, 0.0)


@dataclass(frozen=True)
class Option:
    """A layout, its stages, and a schedule.

    Attributes:
        layout: the costs of calls for its number of micro-batches.
        stretches: its stages.
        name: of its schedule.
        memory: what training holds besides activations, and may hold.
        rules: of a fitted schedule.
    """

    layout: Layout
    stretches: tuple[Stretch, ...]
    name: str
    memory: Memory
    rules: Rules | None = None

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The worker of every stage."""
        return tuple(stretch.worker for stretch in self.stretches)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule for these stages, by its name or, with rules, fitted to their costs."""
        stages, count = len(self.stretches), self.layout.count
        if self.rules is None:
            return built(self.name, stages, count, self.num_workers)
        costs = self.layout.costs(self.stretches)
        placement = self.placement
        return build(self.name, stages, count, costs=costs, placement=placement, rules=self.rules)

    @property
    def num_workers(self) -> int:
        """How many workers run the stages: one for each device of the profile."""
        return len(self.layout.profile.devices)

    @cached_property
    def seconds(self) -> float:
        """The simulated seconds of a step, and what a pass takes besides its actions."""
        stages, count = len(self.stretches), self.layout.count
        if self.rules is None:
            simulator = simulator_of(self.name, stages, count, self.num_workers)
        else:
            simulator = Simulator(self.schedule)
        simulated = self.layout.simulated(simulator, self.stretches)
        return simulated + self.layout.profile.pass_seconds

    @cached_property
    def flying(self) -> tuple[int, ...]:
        """How many micro-batches every stage holds at once."""
        if self.rules is None:
            return in_flight(self.name, len(self.stretches), self.layout.count, self.num_workers)
        return check(self.schedule).in_flight

    @cached_property
    def peaks(self) -> list[float]:
        """The most bytes that every worker holds."""
        return self.layout.peaks(self.stretches, self.flying, self.memory)

    @property
    def splits_backward(self) -> bool:
        """Whether its backwards come in halves."""
        fitted = self.rules is not None and self.rules.split
        return SCHEDULES[self.name].splits_backward or fitted

    @property
    def rank(self) -> tuple[float, int, int]:
        """Among equals, what holds and launches less is preferred."""
        return max(self.peaks), self.layout.count, PREFERENCE.index(self.name)

    def fitted(self, budget: int) -> Option:
        """The same stages with a schedule made for them, in the memory that they leave.

        Args:
            budget: so many rules are tried.
        """
        layout, memory = self.layout, self.memory
        standing = layout.peaks(self.stretches, [0] * len(self.stretches), memory)
        caps = memory.caps(layout.profile)
        left = [max(0.0, float(cap) - used) for cap, used in zip(caps, standing, strict=True)]
        held = tuple(layout.held(stretch) for stretch in self.stretches)
        found = fit(
            layout.costs(self.stretches),
            layout.count,
            self.placement,
            room=Room(tuple(left), held) if min(left) < float("inf") else None,
            split=self.splits_backward,
            overlap=layout.profile.overlap,
            overhead=layout.profile.overhead_seconds,
            budget=budget,
        )
        return replace(self, name=found.name, rules=found.rules)

    @cached_property
    def bound(self) -> float:
        """The least seconds that a step can take.

        With any cuts, if every worker has one stage with whole backwards; otherwise with these.
        """
        layout = self.layout
        if self.splits_backward or len(self.stretches) != self.num_workers:
            costs = layout.costs(self.stretches, min(layout.rows))
            split = self.splits_backward
            return schedule_bound(costs, layout.count, self.placement, split=split)
        found = partition(
            layout.seconds,
            num_microbatches=layout.count,
            fill=min(1.0, layout.least_fill),
            latency=layout.crossing(self.placement, min(layout.rows)),
            allowed=layout.allowed,
        )
        return found.objective

    def candidate(self, chosen: Option) -> Candidate:
        """This option as it is listed in the plan for which `chosen` was chosen."""
        excess = self.seconds / chosen.seconds - 1
        slower = f"{excess:.1%} slower" if excess > 0 else "as fast, but holds or launches more"
        if excess < 1 / EQUAL - 1:
            slower = f"{-excess:.1%} faster, which may be noise"
        return Candidate(
            way="pipeline" if len(self.stretches) > 1 else "one device",
            schedule=self.name,
            num_microbatches=self.layout.count,
            stages=len(self.stretches),
            predicted_step_seconds=self.seconds,
            threads=self.layout.profile.threads,
            memory_bytes=round(max(self.peaks)),
            why="chosen" if self is chosen else slower,
        )

    def plan(self) -> Plan:
        """The plan that runs this option."""
        profile = self.layout.profile
        return Plan(
            fingerprint=profile.fingerprint,
            batch_size=profile.batch_size,
            num_microbatches=self.layout.count,
            schedule=self.name,
            stages=tuple(self.stage_plans()),
            predicted_step_seconds=self.seconds,
            bound_seconds=self.bound,
            one_device_seconds=None,
            overhead_seconds=profile.overhead_seconds,
            pass_seconds=profile.pass_seconds,
            overlap=profile.overlap,
            rules=self.rules,
            memory_limit=self.memory.limit,
            threads=profile.threads,
        )

    def stage_plans(self) -> Iterator[StagePlan]:
        """Its stages, as a plan has them."""
        layout, profile = self.layout, self.layout.profile
        costs = layout.costs(self.stretches)
        for s, stretch in enumerate(self.stretches):
            peak = max(layout.peaks([stretch], [self.flying[s]], self.memory))
            yield StagePlan(
                worker=stretch.worker,
                device=profile.devices[stretch.worker],
                calls=(stretch.start, stretch.stop),
                first=profile.labels[stretch.start],
                last=profile.labels[stretch.stop - 1],
                weight_bytes=sum(profile.weights[stretch.start : stretch.stop]),
                input_bytes=round(layout.boundary[stretch.start]),
                forward_seconds=costs.forward[s],
                backward_seconds=costs.backward[s],
                weight_seconds=costs.weight[s],
                halving_seconds=costs.halving[s],
                latency_seconds=costs.latency[s - 1] if s else 0.0,
                transfer_seconds=costs.transfer[s - 1] if s else 0.0,
                held_bytes=round(layout.held(stretch)),
                memory_bytes=round(peak),
                recompute=stretch.recompute,
            )


def usual_stages(name: str, workers: int) -> int:
    """With how many stages a schedule is tried if no number is asked for."""
    is_one = SCHEDULES[name].stages_per_worker is StagesPerWorker.ONE
    return workers * (1 if is_one else STAGES_PER_WORKER)


def cutter_for(
    layout: Layout,
    name: str,
    stages: int,
    memory: Memory,
    recompute: str | tuple[Span, ...],
    only: Sequence[int] | None = None,
) -> Cutter:
    """The `Cutter` of a layout for a schedule.

    Args:
        layout, memory, recompute, only: as of `Cutter`.
        name: the name of the schedule.
        stages: the number of stages.
    """
    workers = len(layout.profile.devices)
    flying = in_flight(name, stages, layout.count, workers)
    return Cutter(layout, placement_of(name, stages, workers), flying, memory, recompute, only)


def fastest(cutter: Cutter, name: str, beat: float = math.inf) -> Option:
    """The fastest of several exact partitions, which weigh filling and draining differently.

    Args:
        cutter: makes the partitions.
        name: the name of the schedule by which they are simulated.
        beat: seconds of a step. No further partition is tried if those so far all take more than
            `UNLIKELY` times as long.

    Raises:
        CapacityError: nothing fits the memory.
    """
    found: dict[tuple[Stretch, ...], Option] = {}
    for fill in _FILLS:
        stretches = tuple(cutter.best(fill))
        found.setdefault(stretches, Option(cutter.layout, stretches, name, cutter.memory))
        if min(option.seconds for option in found.values()) > UNLIKELY * beat:
            break
    return min(found.values(), key=lambda option: option.seconds)


@cache
def built(name: str, stages: int, count: int, workers: int) -> Schedule:
    """The schedule of this name, made once."""
    return build(name, stages, count, num_workers=workers)


@cache
def simulator_of(name: str, stages: int, count: int, workers: int) -> Simulator:
    """What runs the schedule of this name, made once."""
    return Simulator(built(name, stages, count, workers))


@cache
def in_flight(name: str, stages: int, count: int, workers: int) -> tuple[int, ...]:
    """How many micro-batches every stage holds at once in it."""
    return check(built(name, stages, count, workers)).in_flight
