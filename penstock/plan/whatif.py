"""What if: a model on machines that one does not have, from what was measured on one's own.

One replica of the pipeline is cut and simulated, so thousands of workers take seconds. Of several
replicas, each on workers of its own, the gradients are added in order at the end of the step.
For inference, a steady flow of forwards is predicted instead (`penstock.plan.flow`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from penstock.errors import InputError, PlanError
from penstock.plan.alternatives import adding_seconds, chain_seconds
from penstock.plan.bound import schedule_bound
from penstock.plan.candidates import STAGES_PER_WORKER, Option, cutter_for, fastest
from penstock.plan.decisions import StagePlan, costs_of
from penstock.plan.flow import ShortError, plans_of_flow
from penstock.plan.layout import Layout, Memory
from penstock.plan.partition import CapacityError
from penstock.plan.plan import Plan
from penstock.plan.request import Limits, Recompute, Request
from penstock.plan.shares import Sums, rows_of_replicas
from penstock.profile.data import Link, Profile
from penstock.profile.hardware import Hardware, Machine
from penstock.profile.rows import split_rows
from penstock.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    StagesPerWorker,
    build,
    check,
    placement_of,
)
from penstock.simulate import Network, simulate
from penstock.units import show_bytes

_BUDGET, _LEAST_BUDGET = 20, 4  # rules that are tried for a fitted schedule
_MOST_ACTIONS = 300_000  # that are scheduled in trying them
_BASES = ("eager-1f1b", "zero-bubble", "interleaved", "zero-bubble-v")
"""Whose stages a fitted schedule may take."""


@dataclass(frozen=True)
class WhatIf:
    """Workers that are alike, and what they are given to do.

    Attributes:
        workers: how many there are in all.
        num_microbatches: of every replica of the pipeline.
        microbatch_size: rows of a micro-batch.
        schedule: a name of `penstock.schedule.SCHEDULES`.
        replicas: of the pipeline, each on as many workers; `None` for as few as there must
            be because the program has fewer stages than there are workers.
        stages_per_worker: for schedules that take any number; `None` is two for those.
        batch: rows of all replicas together, instead of `microbatch_size`.
        speed: how many times as fast as what was measured.
        bandwidth: of the links between workers, in bytes per second; `None` as measured.
        latency: one way, in seconds; `None` as measured.
        memory: what training holds besides activations, and may hold.
        recompute: as in `penstock.plan.request.Request`.
        inference: whether it is about a steady flow of forwards; then schedule, recomputation and
            stages per worker have no meaning.
        in_flight: of such a flow, as in `penstock.plan.request.Request`.

    Raises:
        InputError: a number that is not possible, or an unknown schedule.
    """

    workers: int
    num_microbatches: int
    microbatch_size: int = 1
    schedule: str = "1f1b"
    replicas: int | None = None
    stages_per_worker: int | None = None
    batch: int | None = None
    speed: float = 1.0
    bandwidth: float | None = None
    latency: float | None = None
    memory: Memory = field(default_factory=Memory)
    recompute: Recompute = "auto"
    inference: bool = False
    in_flight: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "num_microbatches", "microbatch_size", "replicas", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        if not 0 < self.speed < math.inf:
            raise InputError(f"speed={self.speed} is not a factor; 20 means 20 times as fast")
        if self.schedule not in SCHEDULES:
            raise InputError(
                f"schedule={self.schedule!r} is unknown; choose {', '.join(SCHEDULES)}"
            )
        if self.replicas is not None and self.workers % self.replicas:
            raise InputError(
                f"{self.workers} workers cannot be divided among {self.replicas} replicas; give "
                f"one of {', '.join(map(str, _divisors(self.workers)))}"
            )

    def link(self, measured: Link) -> Link:
        """The link between two workers: as given, otherwise as measured."""
        speed, latency = self.bandwidth, self.latency
        return Link(
            latency_seconds=measured.latency_seconds if latency is None else latency,
            bytes_per_second=measured.bytes_per_second if speed is None else speed,
        )

    @property
    def per_worker(self) -> int:
        """How many stages each worker has with this schedule; one in a flow of forwards."""
        if self.inference:
            return 1
        takes = SCHEDULES[self.schedule].stages_per_worker
        if takes is StagesPerWorker.ONE:
            return 1
        if takes is StagesPerWorker.TWO:
            return 2
        least = STAGES_PER_WORKER if self.schedule != "fitted" else 1
        return self.stages_per_worker or least


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a case.

    Attributes:
        case: what was asked.
        replicas: of the pipeline.
        stages: of each replica.
        batch_size: rows of all replicas together.
        step_seconds: of a training step without the optimizer, or from batch to batch in a steady
            flow of forwards; `None` if it is not possible.
        reduce_seconds: the part of it in which the replicas add up their gradients.
        bound_seconds: with these cuts no schedule is faster.
        one_worker_seconds: for the same batch, one worker alone with memory for it.
        memory_bytes: the most that a worker holds.
        note: why it is not possible, or what was chosen because it had to be.
    """

    case: WhatIf
    replicas: int
    stages: int
    batch_size: int
    step_seconds: float | None
    reduce_seconds: float = 0.0
    bound_seconds: float = 0.0
    one_worker_seconds: float = 0.0
    memory_bytes: int = 0
    note: str = ""

    @property
    def samples_per_second(self) -> float | None:
        """Rows of the whole batch per second; `None` if the case is not possible."""
        return self.batch_size / self.step_seconds if self.step_seconds else None

    @property
    def efficiency(self) -> float | None:
        """The throughput as a share of that of as many workers that all work alone."""
        if not self.step_seconds:
            return None
        return self.one_worker_seconds / self.step_seconds / self.case.workers


def what_if(profile: Profile, case: WhatIf) -> Predicted:
    """Cut the program anew for these workers, and simulate one replica of the pipeline.

    The workers are as fast as the profile's first device, times `case.speed`.

    Raises:
        InputError: fewer rows than micro-batches.
        PlanError: more stages are asked for than there are places to cut.
    """
    replicas, note = _replicas(profile, case)
    if case.inference:
        return _what_if_flow(profile, case, replicas, note)
    link = case.link(_measured(profile))
    sums: Sums = "chained" if link.bytes_per_second else "shared"
    case = replace(case, memory=replace(case.memory, replicas=replicas, sums=sums))
    stages = case.workers // replicas * case.per_worker
    rows = _rows(case, replicas)
    own = profile.of_replica if replicas > 1 else profile
    outcome = Predicted(case, replicas, stages, case.batch or rows * replicas, None, note=note)
    total = min(case.num_microbatches * replicas, outcome.batch_size)
    every = split_rows(outcome.batch_size, total)
    first = rows_of_replicas(every, (1,) * replicas, sums)[0]  # no other replica has more
    machines = _machines(own, case, case.workers // replicas, rows)
    layout = Layout(machines, case.num_microbatches, first)
    try:
        option = _option(layout, case, stages)
    except CapacityError as error:
        short = show_bytes(error.shortfall.bytes)
        return replace(outcome, note=f"does not fit the memory by {short}")
    weights = [0.0] * option.num_workers
    for stretch in option.stretches:
        weights[stretch.worker] += float(layout.weights[stretch.start : stretch.stop].sum())
    adding = profile.on(profile.devices[0]).added_per_second * case.speed
    if sums == "shared":
        reduced = adding_seconds(weights, replicas, adding)
    else:
        reduced = chain_seconds(max(weights), replicas, case.num_microbatches, link, adding)
    actions = 2 * case.num_microbatches * profile.overhead_seconds + profile.pass_seconds
    one = Layout(_machines(profile, case, 1, rows), case.num_microbatches)
    alone = float(one.seconds[0].sum()) * case.num_microbatches + actions
    costs = layout.costs(option.stretches, min(layout.rows))
    bound = schedule_bound(costs, layout.count, option.placement, split=option.splits_backward)
    return replace(
        outcome,
        stages=len(option.stretches),
        step_seconds=option.seconds + reduced,
        reduce_seconds=reduced,
        bound_seconds=bound + reduced,
        one_worker_seconds=alone * replicas,
        memory_bytes=round(max(option.peaks)),
    )


def what_if_planned(plan: Plan, case: WhatIf) -> Predicted:
    """The plan's own stages on other machines, without the profile that they were cut by.

    Raises:
        PlanError: the case needs other stages, or other sizes of micro-batches.
    """
    if case.inference:
        return _what_if_planned_flow(plan, case)
    if plan.replicas > 1:
        raise PlanError(
            f"the plan has {plan.replicas} replicas, of which the plan alone does not say how they "
            "add up gradients: give the profile that it was made from"
        )
    schedule = _planned_schedule(plan, case)
    costs = _planned_costs(plan, case)
    found = check(schedule)
    held = plan.memory_with(found.in_flight)
    rows = case.num_microbatches * case.microbatch_size
    outcome = Predicted(case, 1, len(plan.stages), case.batch or rows, None, memory_bytes=held)
    if case.memory.limit is not None and held > case.memory.limit:
        short = show_bytes(held - case.memory.limit)
        return replace(outcome, note=f"does not fit the memory by {short}")
    network = Network.of(costs, overlap=plan.overlap, overhead=plan.overhead_seconds)
    alone = sum(costs.forward) + sum(costs.backward) + 2 * plan.overhead_seconds
    count, split = case.num_microbatches, found.splits_backward
    return replace(
        outcome,
        step_seconds=simulate(schedule, costs.seconds, network).seconds + plan.pass_seconds,
        bound_seconds=schedule_bound(costs, count, plan.placement, split=split),
        one_worker_seconds=alone * count + plan.pass_seconds,
    )


# -- a steady flow of forwards ------------------------------------------------------------


def _what_if_flow(profile: Profile, case: WhatIf, replicas: int, note: str) -> Predicted:
    """Cut the program anew for a steady flow through these workers."""
    rows = case.batch or _rows(case, replicas) * replicas
    request = Request(
        num_microbatches=case.num_microbatches * replicas,
        memory_limit=case.memory.limit,
        replicas=replicas,
        inference=True,
        in_flight=case.in_flight,
    )
    request.check_count(rows)
    outcome = Predicted(case, replicas, case.workers // replicas, rows, None, note=note)
    alone = msgspec.structs.replace(_machines(profile, case, 1, rows), capacity={})
    one = replace(request, memory_limit=None, replicas=1)
    here = _machines(profile, case, case.workers, rows)
    try:
        found = plans_of_flow([here], request, 1, Limits())[0]
    except ShortError as error:
        return replace(outcome, note=f"does not fit the memory by {show_bytes(error.missing)}")
    return replace(
        outcome,
        step_seconds=found.predicted_step_seconds,
        bound_seconds=found.bound_seconds,
        one_worker_seconds=plans_of_flow([alone], one, 1, Limits())[0].predicted_step_seconds,
        memory_bytes=max(stage.memory_bytes for stage in found.stages),
    )


def _what_if_planned_flow(plan: Plan, case: WhatIf) -> Predicted:
    """A steady flow through the plan's own stages, without the profile that they were cut by.

    Raises:
        PlanError: the case needs other stages, or other sizes of micro-batches.
    """
    replicas = case.replicas or 1
    _check_planned(
        {
            "workers": (case.workers, len(plan.devices)),
            "replicas": (replicas, plan.replicas),
            "rows in a batch": (case.batch or plan.batch_size, plan.batch_size),
            "rows in a micro-batch": (_largest(case, replicas), plan.microbatch_size),
            "groups in flight": (case.in_flight or plan.groups, plan.groups),
        }
    )
    every = [_planned_costs(plan, case, plan.stages_of(k)) for k in range(replicas)]
    count, overhead = case.num_microbatches, plan.overhead_seconds
    busiest, alone = 0.0, math.inf
    for costs in every:
        for work, send in zip(costs.forward, (*costs.transfer, 0.0), strict=True):
            both = max(work + overhead, send) if plan.overlap else work + overhead + send
            busiest = max(busiest, count * both)
        alone = min(alone, count * replicas * (sum(costs.forward) + overhead))
    held = max(s.memory_bytes for k in range(replicas) for s in plan.stages_of(k))
    rows = case.batch or count * replicas * case.microbatch_size
    outcome = Predicted(case, replicas, len(plan.stages), rows, None, memory_bytes=held)
    if case.memory.limit is not None and held > case.memory.limit:
        short = show_bytes(held - case.memory.limit)
        return replace(outcome, note=f"does not fit the memory by {short}")
    seconds = max(busiest, plan.pass_seconds)
    return replace(
        outcome,
        step_seconds=seconds,
        bound_seconds=seconds,
        one_worker_seconds=max(alone, plan.pass_seconds),
    )


# -- with a profile -----------------------------------------------------------------------


def _measured(profile: Profile) -> Link:
    """The link between two devices like the first."""
    return profile.link(profile.devices[0], profile.devices[0])


def _machines(profile: Profile, case: WhatIf, workers: int, rows: int) -> Profile:
    """The profile on the workers of one replica, for its part of the batch."""
    first = profile.devices[0]
    machine = Machine(name=first, count=workers, like=first, speed=case.speed)
    hardware = Hardware(machines=(machine,), link=case.link(_measured(profile)))
    return msgspec.structs.replace(hardware.apply(profile), batch_size=rows)


def _replicas(profile: Profile, case: WhatIf) -> tuple[int, str]:
    """How many replicas there are, and what to say of it.

    Raises:
        PlanError: a replica has more stages than the program has places for.
    """
    most = 1 + sum(k not in profile.forbidden for k in range(1, profile.num_calls))
    fitting = [r for r in _divisors(case.workers) if case.workers // r * case.per_worker <= most]
    if case.replicas is None and fitting:
        note = "" if fitting[0] == 1 else f"replicas, as the program has places for {most} stages"
        return fitting[0], note
    stages = case.workers // (case.replicas or case.workers) * case.per_worker
    if stages <= most:
        return case.replicas or case.workers, ""
    advice = f"give {fitting[0]} or more replicas" if fitting else "give fewer stages to a worker"
    raise PlanError(
        f"{stages} stages are more than the {most} that the program has places for; {advice}"
    )


def _rows(case: WhatIf, replicas: int) -> int:
    """The rows of one replica.

    Raises:
        InputError: fewer than micro-batches.
    """
    if case.batch is None:
        return case.num_microbatches * case.microbatch_size
    rows = -(-case.batch // replicas)
    if rows < case.num_microbatches:
        raise InputError(
            f"a batch of {case.batch} gives every one of {replicas} replicas {rows} rows, fewer "
            f"than its {case.num_microbatches} micro-batches; give a larger batch, or fewer of them"
        )
    return rows


def _option(layout: Layout, case: WhatIf, stages: int) -> Option:
    """The stages of the exact partition, and the schedule.

    Raises:
        CapacityError: nothing fits the memory.
    """
    if case.schedule != "fitted":
        return _cut(layout, case, case.schedule, stages)
    workers = len(layout.profile.devices)
    most = 1 + int(layout.allowed[1:-1].sum())
    numbers = [stages] if case.stages_per_worker else [workers, 2 * workers]
    bases = [
        _cut(layout, case, name, number)
        for number in numbers
        for name in _BASES
        if SCHEDULES[name].takes(number, workers) and number <= most
    ]
    option = min(bases, key=lambda option: option.seconds)
    actions = 2 * layout.count * len(option.stretches)
    return option.fitted(max(_LEAST_BUDGET, min(_BUDGET, _MOST_ACTIONS // actions)))


def _cut(layout: Layout, case: WhatIf, name: str, stages: int) -> Option:
    """The option with this schedule and this many stages; raises `CapacityError`."""
    profile, request = layout.profile, Request(recompute=case.recompute)
    again = request.recomputed(profile.labels, profile.forbidden)
    return fastest(cutter_for(layout, name, stages, case.memory, again), name)


# -- with the plan alone ------------------------------------------------------------------


def _planned_schedule(plan: Plan, case: WhatIf) -> Schedule:
    """The schedule on the plan's stages.

    Raises:
        PlanError: the case is not about these stages.
    """
    compared = {
        "workers": (case.workers, len(plan.devices)),
        "replicas": (case.replicas or 1, 1),
        "rows in a batch": (case.batch or plan.batch_size, plan.batch_size),
        "rows in a micro-batch": (_largest(case, 1), plan.microbatch_size),
        "stages": (case.per_worker * case.workers, len(plan.stages)),
    }
    if case.schedule == "fitted":
        del compared["stages"]
    _check_planned(compared)
    if case.schedule == plan.schedule:
        return plan.schedule_for(case.num_microbatches)
    placement = placement_of(case.schedule, len(plan.stages), case.workers)
    if placement != plan.placement:
        raise PlanError(
            f"{case.schedule} puts the stages on other workers than the plan does: give the "
            "profile that the plan was made from, or plan again"
        )
    return build(case.schedule, len(plan.stages), case.num_microbatches, num_workers=case.workers)


def _largest(case: WhatIf, replicas: int) -> int:
    """The rows of the largest micro-batch."""
    if case.batch is None:
        return case.microbatch_size
    return -(-case.batch // (case.num_microbatches * replicas))


def _check_planned(compared: Mapping[str, tuple[int, int]]) -> None:
    """Raise unless what is asked for is what was planned.

    Args:
        compared: what is asked for and what was planned, by what it is.

    Raises:
        PlanError: something is not.
    """
    for what, (wanted, planned) in compared.items():
        if wanted != planned:
            raise PlanError(
                f"the plan is for {planned} {what}, and for {wanted} the model has to be cut "
                "again: give the profile that the plan was made from, or plan again"
            )


def _planned_costs(plan: Plan, case: WhatIf, stages: Sequence[StagePlan] = ()) -> Costs:
    """What the plan's stages take on the machines of the case.

    Args:
        plan, case: as of `what_if_planned`.
        stages: those of a replica; of the first one by default.
    """
    own = stages or plan.stages
    costs, speed = costs_of(own), case.speed
    transfer, latency = costs.transfer, costs.latency
    if case.bandwidth is not None:
        transfer = tuple(stage.input_bytes / case.bandwidth for stage in own[1:])
    if case.latency is not None:
        latency = (case.latency,) * len(latency)
    return Costs(
        forward=tuple(seconds / speed for seconds in costs.forward),
        backward=tuple(seconds / speed for seconds in costs.backward),
        weight=tuple(seconds / speed for seconds in costs.weight),
        halving=tuple(seconds / speed for seconds in costs.halving),
        latency=latency,
        transfer=transfer,
    )


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
