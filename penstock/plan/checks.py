"""Whether a plan can be followed."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.plan.decisions import HALF, Decisions
from penstock.schedule import SCHEDULES


def mistakes(plan: Decisions) -> Iterator[str]:
    """The mistakes in a plan, whose file may have been edited by hand: one text for each."""
    if plan.schedule not in SCHEDULES:
        yield f"schedule={plan.schedule!r} is unknown; there are {', '.join(SCHEDULES)}"
        return
    if not 1 <= plan.num_microbatches <= plan.batch_size:
        yield f"{plan.num_microbatches} micro-batches of {plan.batch_size} rows"
    if not (plan.predicted_step_seconds > 0 and plan.bound_seconds > 0):
        yield "predicted_step_seconds and bound_seconds have to be more than zero"
    if not plan.stages or {*plan.placement} != {*range(len({*plan.placement}))}:
        yield "stages: their workers have to be numbered from 0, without gaps"
    elif plan.rules is None:
        workers = max(plan.placement) + 1
        recipe, stages = SCHEDULES[plan.schedule], len(plan.stages)
        takes = recipe.takes(stages, workers)
        if not takes or recipe.place(stages, workers) != plan.placement:
            yield f"{plan.schedule} does not run stages on workers {plan.placement}"
    yield from _of_rules(plan)
    if plan.boundary_dtype not in (None, *HALF):
        yield f"boundary_dtype={plan.boundary_dtype!r} is none of {', '.join(HALF)}"
    if plan.stages and (plan.other_replicas or plan.other_stages or plan.shares):
        yield from _of_replicas(plan)
    begin = 0
    yield from _of_inference(plan)
    for number, stage in enumerate(plan.stages):
        first, end = stage.calls
        if first != begin or end <= first:
            yield f"stage {number}: calls={first, end} do not go on from call {begin}"
        begin = end
        edges = [first, *(edge for span in stage.recompute for edge in span), end]
        if edges != sorted(edges) or any(a == b for a, b in stage.recompute):
            yield f"stage {number}: recompute={stage.recompute} are no spans of {first, end}"


def _of_rules(plan: Decisions) -> Iterator[str]:
    if (plan.rules is None) == (plan.schedule == "fitted"):
        yield "rules belong to a plan with schedule='fitted', and to no other"
    elif plan.rules is not None and len(plan.rules.lead) != len(plan.stages):
        yield f"rules for {len(plan.rules.lead)} stages, and there are {len(plan.stages)}"


def _of_inference(plan: Decisions) -> Iterator[str]:
    if plan.inference and any(stage.recompute for stage in plan.stages):
        yield "a plan for inference recomputes nothing, as it has no backwards"
    if plan.inference and len(plan.stages) != len({*plan.placement}):
        yield "a plan for inference has one stage on each worker"
    if plan.in_flight < 0:
        yield f"in_flight={plan.in_flight} is less than 0"


def _of_replicas(plan: Decisions) -> Iterator[str]:
    each = plan.workers_per_replica
    if any(len(devices) != each for devices in plan.other_replicas):
        yield f"other_replicas={plan.other_replicas}: each needs {each} devices"
    if plan.replicas > plan.num_microbatches:
        yield f"{plan.replicas} replicas cannot share {plan.num_microbatches} micro-batches"
    if plan.splits_backward and plan.replicas > 1:
        yield f"{plan.schedule} halves backwards, which replicas do not"
    if plan.shares and (
        len(plan.shares) != plan.replicas
        or min(plan.shares) < 1
        or sum(plan.shares) != plan.num_microbatches
    ):
        yield (
            f"shares={plan.shares} are not {plan.replicas} numbers from 1 whose sum is "
            f"{plan.num_microbatches} micro-batches"
        )
    if plan.other_stages and any(
        [stage.calls for stage in stages] != [stage.calls for stage in plan.stages]
        for stages in plan.other_stages
    ):
        yield "other_stages: a replica has other calls than the first"
    if len(plan.other_stages) not in (0, len(plan.other_replicas)):
        yield (
            f"other_stages is for {len(plan.other_stages)} replicas, and other_replicas for "
            f"{len(plan.other_replicas)}"
        )
