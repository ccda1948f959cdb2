"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.display.tables import aligned
from penstock.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from penstock.plan.plan import Candidate, Plan, StagePlan

_HEADING = ("stage", "worker", "modules", "weights", "enters", "forward", "backward", "memory", "")
_STAGE_TEXTS = (1, 2, 8)
_CONSIDERED = ("", "replicas", "stages", "micro-batches", "predicted", "memory", "")
_CONSIDERED_TEXTS = (0, 6)
_RING = "as with DistributedDataParallel, which sums gradients in another order than one device"

_IDLE = 0.1  # of a step; a worker that is busy for less is hardly needed

Way = Literal["pipeline", "one device", "data parallel"]


def winner(plan: Plan) -> Way:
    """The fastest of what was predicted: the plan itself, one device alone, or data parallelism."""
    alone, parallel, here = _predicted(plan)
    if len(plan.devices) == 1 or here < min(alone, parallel):
        return "pipeline"
    return "one device" if alone <= parallel else "data parallel"


def describe(plan: Plan) -> str:
    """What wins, a line for every stage, what is predicted, and what was considered."""
    lines = [verdict(plan), "", *stages(plan), "", prediction(plan)]
    if plan.considered:
        lines += ["", *considered(plan)]
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """What is the fastest thing to do with these devices."""
    alone, parallel, here = _predicted(plan)
    if len(plan.devices) == 1:
        return "There is one device: nothing to split."
    if winner(plan) == "one device":
        return (
            f"One device alone is predicted to be faster ({show_seconds(alone)}): splitting is not "
            "worth it here."
        )
    if winner(plan) == "data parallel":
        return (
            f"Data parallelism is predicted to be faster ({show_seconds(parallel)}): a replica of "
            f"the model on every device, {_RING}."
        )
    return (
        f"Splitting is predicted to be the fastest: {show_seconds(here)} a step, "
        f"{_against(here, alone, 'one device')}, {_against(here, parallel, 'data parallelism')}."
    )


def advice(plan: Plan) -> list[str]:
    """What somebody should know before he trains by this plan: a sentence for each, if any."""
    found = []
    if winner(plan) != "pipeline":
        here = show_seconds(plan.predicted_step_seconds)
        found.append(f"{verdict(plan)} The pipeline is predicted to take {here} a step.")
    timeline = plan.timeline()
    for worker, busy in enumerate(timeline.busy()):
        if busy < _IDLE * timeline.seconds:
            found.append(
                f"Worker {worker} is predicted to work for {busy / timeline.seconds:.0%} of a step "
                "only: the model has too little that can be given to it. Fewer devices would do."
            )
    return found


def prediction(plan: Plan) -> str:
    """The configuration, and what is predicted of it."""
    return (
        f"{plan.schedule}, {_counted(plan)}{_boundaries(plan)}: "
        f"{show_seconds(plan.predicted_step_seconds)} "
        f"predicted, {_share(plan)} of the bound ({show_seconds(plan.bound_seconds)})"
    )


def summarise(plan: Plan) -> str:
    """The same in a sentence, with what it is compared with."""
    alone, parallel, _ = _predicted(plan)
    text = prediction(plan)
    if len(plan.devices) == 1:
        return text
    return f"{text}; one device {_fitting(alone)}; data parallel {_fitting(parallel)}"


def stages(plan: Plan, width: int | None = None) -> list[str]:
    """A line for every stage, and what the columns do not say; no longer than `width`."""
    rows = [_row(number, stage) for number, stage in enumerate(plan.stages)]
    return aligned([_HEADING, *rows], _STAGE_TEXTS, width)


def considered(plan: Plan, width: int | None = None) -> list[str]:
    """A line for the best of every way and schedule, the fastest first; no longer than `width`."""
    best: dict[tuple[str, str, int], Candidate] = {}
    for candidate in plan.considered:
        best.setdefault((candidate.way, candidate.schedule, candidate.replicas), candidate)
    rows = [_considered(candidate, plan) for candidate in best.values()]
    lines = aligned([("considered", *_CONSIDERED[1:]), *rows], _CONSIDERED_TEXTS, width)
    others = len(plan.considered) - len(best)
    if others:
        lines.append(f"and {others} other micro-batch counts and stages; plan.considered has all")
    return lines


def _predicted(plan: Plan) -> tuple[float, float, float]:
    """Seconds of one device, of data parallelism and of the plan; infinite if it does not fit."""
    alone, parallel = plan.one_device_seconds, plan.data_parallel_seconds
    never = float("inf")
    return (
        never if alone is None else alone,
        never if parallel is None else parallel,
        plan.predicted_step_seconds,
    )


def _against(here: float, other: float, name: str) -> str:
    if other == float("inf"):
        return f"and {name} does not fit the memory"
    return f"{other / here:.2f} times as fast as {name} ({show_seconds(other)})"


def _fitting(seconds: float) -> str:
    return "does not fit" if seconds == float("inf") else show_seconds(seconds)


def _counted(plan: Plan) -> str:
    size = f"{plan.microbatch_size} row{'s' * (plan.microbatch_size > 1)}"
    if plan.num_microbatches == 1:
        return f"1 micro-batch of {size}"
    upto = "up to " if plan.batch_size % plan.num_microbatches else ""
    return f"{plan.num_microbatches} micro-batches of {upto}{size}"


def _boundaries(plan: Plan) -> str:
    return f", boundaries in {plan.boundary_dtype}" if plan.boundary_dtype else ""


def _share(plan: Plan) -> str:
    return f"{plan.bound_seconds / plan.predicted_step_seconds:.0%}"


def _row(number: int, stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.calls
    again = sum(b - a for a, b in stage.recompute)
    return (
        str(number),
        f"{stage.worker} {stage.device}",
        stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}",
        show_bytes(stage.weight_bytes),
        show_bytes(stage.input_bytes),
        show_seconds(stage.forward_seconds),
        show_seconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
        f"recomputes {again} of {last - first} calls" if again else "",
    )


def _considered(found: Candidate, plan: Plan) -> tuple[str, ...]:
    seconds = found.predicted_step_seconds
    name = found.schedule if found.way == "pipeline" else found.way
    return (
        f"{name}, {found.schedule}" if found.schedule != name and found.schedule else name,
        str(found.replicas),
        str(found.stages),
        str(found.num_microbatches),
        "-" if seconds is None else show_seconds(seconds),
        show_bytes(found.memory_bytes) if found.memory_bytes else "-",
        _why(found, plan),
    )


def _why(found: Candidate, plan: Plan) -> str:
    """Why it was not chosen; of what Penstock does not run, how it compares."""
    seconds = found.predicted_step_seconds
    if found.way == "pipeline" or seconds is None:
        return found.why
    excess = seconds / plan.predicted_step_seconds - 1
    if excess > 0:
        return f"{excess:.1%} slower"
    return f"{-excess:.1%} faster" + (", not a pipeline" if found.way != "one device" else "")
