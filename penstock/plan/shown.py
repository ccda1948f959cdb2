"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.units import show_bytes

if TYPE_CHECKING:
    from penstock.plan.plan import Candidate, Plan, StagePlan

_HEADING = "stage worker device calls from to weights enters fwd bwd memory recomputed".split()
_MOST_CANDIDATES = 12


def describe(plan: Plan) -> str:
    """What wins, a line for every stage, and what was considered."""
    stages = [_HEADING, *(_row(number, stage) for number, stage in enumerate(plan.stages))]
    lines = [plan.summary, "", *table(stages)]
    if plan.considered:
        lines += ["", "considered", *considered(plan.considered)]
    return "\n".join(lines)


def _row(number: int, stage: StagePlan) -> list[str]:
    first, last = stage.calls
    again = sum(b - a for a, b in stage.recompute)
    return [
        str(number),
        str(stage.worker),
        stage.device,
        f"{first}-{last - 1}",
        stage.first,
        stage.last,
        show_bytes(stage.weight_bytes),
        show_bytes(stage.input_bytes),
        milliseconds(stage.forward_seconds),
        milliseconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
        f"{again} of {last - first} calls" if again else "-",
    ]


def considered(candidates: Sequence[Candidate]) -> list[str]:
    """A line for each, the fastest first."""
    rows = [["", "replicas", "stages", "micro-batches", "predicted", "memory", ""]]
    for found in candidates[:_MOST_CANDIDATES]:
        time = found.predicted_step_seconds
        rows.append(
            [
                found.schedule or found.way,
                str(found.replicas),
                str(found.stages),
                str(found.num_microbatches),
                "-" if time is None else milliseconds(time),
                show_bytes(found.memory_bytes) if found.memory_bytes else "-",
                found.why,
            ]
        )
    more = len(candidates) - _MOST_CANDIDATES
    return [*table(rows), *([f"and {more} more, in plan.considered"] if more > 0 else [])]


def summarise(plan: Plan) -> str:
    """One or two sentences: what wins, the configuration, and what is predicted of it."""
    share = plan.bound_seconds / plan.predicted_step_seconds
    text = (
        f"{plan.schedule}, {plan.num_microbatches} micro-batches of up to "
        f"{plan.microbatch_size} rows: {milliseconds(plan.predicted_step_seconds)} predicted, "
        f"{share:.0%} of the bound"
    )
    for name, seconds in (
        ("one device", plan.one_device_seconds),
        ("data parallel", plan.data_parallel_seconds),
    ):
        if len(plan.devices) > 1:
            shown = "does not fit" if seconds is None else milliseconds(seconds)
            text += f"; {name} {shown}"
    return _verdict(plan) + text


def _verdict(plan: Plan) -> str:
    """What is faster than the plan, if anything is."""
    alone, copies = plan.one_device_seconds, plan.data_parallel_seconds
    here = plan.predicted_step_seconds
    if len(plan.devices) == 1:
        return ""
    if alone is not None and alone <= min(here, copies or here):
        return (
            f"One device alone is predicted to be faster ({milliseconds(alone)}): splitting is not "
            "worth it here. Split, it would be "
        )
    if copies is None or copies > here:
        return ""
    return (
        f"Data parallelism is predicted to be faster ({milliseconds(copies)}): a copy of "
        "the model on every device, as with DistributedDataParallel, which sums gradients in "
        "another order than one device. Split, it would be "
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return [line.rstrip() for line in lines]


def milliseconds(seconds: float) -> str:
    """`12.3 ms`."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.3f} ms"
