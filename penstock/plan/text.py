"""What a plan says to its reader: what wins, what is predicted, and tables of all of it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.display.tables import aligned
from penstock.plan.decisions import (
    WORTH_FEWER,
    Candidate,
    Decisions,
    StagePlan,
    Way,
    fastest_of,
)
from penstock.profile.data import Profile
from penstock.units import show_bytes, show_seconds

_STAGE_HEADING = (
    *("stage", "worker", "modules", "weights", "enters", "forward", "backward", "memory", ""),
)
_STAGE_TEXTS = (1, 2, 8)
_FORWARD_HEADING = (
    *("stage", "worker", "modules", "weights", "states", "enters", "forward", "memory"),
)
_CONSIDERED_HEADING = (
    *("considered", "replicas", "stages", "micro-batches", "predicted", "memory", ""),
)
_REPLICA_HEADING = ("replica", "devices", "micro-batches", "slowest stage", "memory")
_RING = "as with DistributedDataParallel, which sums gradients in another order than one device"
_IN_ORDER = "replicas={} does that, and sums gradients in the order of one device"

_WAITING = 0.9  # of a micro-batch's time; a device whose launches take longer has nothing ahead
_IDLE = 0.1  # of a step; a worker that is busy for less is hardly needed


def whole(plan: Decisions) -> str:
    """The verdict, the stages, what is predicted, and what else was considered."""
    lines = [verdict(plan), *filter(None, [plan.note]), "", *stages(plan), "", prediction(plan)]
    if plan.other_stages:
        lines += ["", *replicas(plan)]
    if plan.considered:
        lines += ["", *considered(plan)]
    return "\n".join(lines)


def summary(plan: Decisions) -> str:
    """The configuration and what is predicted of it, also of one device and data parallelism."""
    if len(plan.devices) == 1:
        return prediction(plan)
    alone, parallel, _ = _predicted(plan)
    others = f"one device {_fitting(alone)}"
    if plan.batch_size >= len(plan.devices):
        others += f"; data parallel {_fitting(parallel)}"
    return f"{prediction(plan)}; {others}"


def winner(plan: Decisions) -> Way:
    """What was predicted to be the fastest: the kind of the plan, unless something beats it."""
    return _beaten_by(plan) or plan.way


def _beaten_by(plan: Decisions) -> Way | None:
    """What is predicted to be faster than the plan, and was not asked for or is not possible."""
    alone, parallel, here = _predicted(plan)
    if len(plan.devices) == 1:
        return None
    chosen_from = any(c.way == "one device" and not c.only_compared for c in plan.considered)
    if plan.inference and here <= min(
        alone, parallel
    ):  # as fast as what the script can keep up with
        return None
    if alone <= here and not chosen_from:  # else it is too little faster
        return "one device" if alone <= parallel or plan.replicas > 1 else "data parallel"
    return "data parallel" if parallel <= here and plan.replicas == 1 else None


def verdict(plan: Decisions) -> str:
    """What is the fastest thing to do with these devices."""
    alone, parallel, here = _predicted(plan)
    beaten_by = _beaten_by(plan)
    if plan.inference and beaten_by == "data parallel":
        return (
            f"Replicas of the whole model are predicted to be faster ({show_seconds(parallel)} a "
            f"batch): replicas={len(plan.devices)} runs one on every device."
        )
    if beaten_by == "one device":
        return (
            f"One device alone is predicted to be faster ({show_seconds(alone)}): splitting is not "
            "worth it here."
        )
    if beaten_by == "data parallel":
        how = "" if plan.note else f"; {_how_to_have_it(plan.devices)}"
        return (
            f"Data parallelism is predicted to be faster ({show_seconds(parallel)}): a replica of "
            f"the model on every device{how}."
        )
    if len(plan.devices) == 1:
        return _of_one_worker(plan)
    if plan.replicas == 1:
        what, other = "Splitting is", _against(here, parallel, "data parallelism")
        few = plan.batch_size < len(plan.devices)
        if few or (plan.inference and plan.data_parallel_seconds is None):
            other = ""  # a micro-batch is on one replica, so one of them has no data parallelism
    else:
        split = fastest_of(c for c in plan.considered if c.replicas == 1 and c.way == "pipeline")
        what = f"{plan.replicas} replicas are"
        other = "" if split is None else _against(here, split, "one replica")
    if alone < here:
        return _though_slower(plan, what, alone, "one device alone")
    compared = ", ".join(filter(None, (_against(here, alone, "one device"), other)))
    return f"{what} predicted to be the fastest: {_each(plan)}, {compared}."


def _how_to_have_it(devices: Sequence[str]) -> str:
    """What runs a replica on each of these devices."""
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        return _RING
    where = "" if kinds == {"cpu"} else "in threads and under torchrun, "
    return where + _IN_ORDER.format(len(devices))


def _each(plan: Decisions) -> str:
    """The seconds of a step, or of a batch in a steady flow."""
    return f"{show_seconds(plan.predicted_step_seconds)} a {'batch' if plan.inference else 'step'}"


def _of_one_worker(plan: Decisions) -> str:
    """What is said of a plan of one worker: whether it is the best of several."""
    here = plan.predicted_step_seconds
    if plan.inference and len(plan.considered) == 1:
        return f"There is one device: nothing to split. {_each(plan)} in a steady flow."
    others = [c for c in plan.considered if c.way != "one device" and not c.only_compared]
    best = fastest_of(others)
    if not others:
        return "There is one device: nothing to split."
    which = "One device alone"
    if not _left_out(plan):
        which = f"One worker with {plan.threads} intra-op threads"
    if best is None:
        return f"{which} is all that fits the memory: {_each(plan)}."
    if best < here:
        return _though_slower(plan, f"{which} is", best, "the best plan of several workers")
    return (
        f"{which} is predicted to be the fastest: {_each(plan)}, "
        f"{_against(here, best, 'the best plan of several workers')}."
    )


def _though_slower(plan: Decisions, what: str, other: float, name: str) -> str:
    """What is said of a plan that was chosen though another is predicted to be faster."""
    is_close = plan.predicted_step_seconds < WORTH_FEWER * other
    close = ": a difference within the noise of a profile" if is_close else ""
    return f"{what} predicted to take {_each(plan)}, and {name} {show_seconds(other)}{close}."


def _left_out(plan: Decisions) -> list[Candidate]:
    """What else was possible with workers like that of this plan, if it is the only one."""
    if len(plan.devices) > 1:
        return []
    return [
        candidate
        for candidate in plan.considered
        if candidate.threads == plan.threads
        and candidate.way != "one device"
        and not candidate.only_compared
    ]


def advice(plan: Decisions) -> list[str]:
    """What somebody should know before he runs this plan: a sentence for each, if any."""
    found = []
    if _beaten_by(plan) is not None:
        found.append(f"{verdict(plan)} The pipeline is predicted to take {_each(plan)}.")
    if left_out := _left_out(plan):
        numbers = {candidate.replicas for candidate in left_out}
        ways = ["replicas=1 splits the model over all of them"] if 1 in numbers else []
        if max(numbers) > 1:
            ways.append(f"replicas={max(numbers)} runs {max(numbers)} replicas")
        found.append(
            f"{verdict(plan).rstrip('.')}, so the other devices are not used; {', '.join(ways)}."
        )
    timeline = plan.timeline()
    for worker, busy in enumerate(timeline.busy()):
        if busy < _IDLE * timeline.seconds:
            share = f"{busy / timeline.seconds:.0%} of {'the time' if plan.inference else 'a step'}"
            found.append(
                f"Worker {worker} is predicted to work for {share} "
                "only: the model has too little that can be given to it. Fewer devices would do."
            )
    return found


def launches(plan: Decisions, profile: Profile) -> list[str]:
    """Which devices wait for the CPU that launches their work, and what would help.

    Args:
        plan: whose micro-batches they run.
        profile: what they take.
    """
    found = []
    for name in dict.fromkeys(plan.devices):
        share = profile.on(name).launched(plan.batch_size / plan.num_microbatches)
        if share < _WAITING:
            continue
        ways = ["larger micro-batches are launched less often"]
        if name.startswith("cuda") and plan.replicas == 1:  # both are for one replica
            ways.insert(0, "cuda_graphs=True launches a stage at once")
            if len(plan.devices) > 1:
                ways.insert(1, 'with workers="processes" every GPU has an interpreter of its own')
        found.append(
            f"{name} waits for the CPU, which launches its work for {share:.0%} of the time of a "
            f"micro-batch: {', '.join(ways)}."
        )
    return found


def prediction(plan: Decisions) -> str:
    """The configuration, and what is predicted of it."""
    replicas = f"{plan.replicas} replicas, " if plan.replicas > 1 else ""
    if plan.inference:
        return _prediction_of_flow(plan)
    return (
        f"{replicas}{plan.schedule}, {_counted(plan)}{_boundaries(plan)}: "
        f"{show_seconds(plan.predicted_step_seconds)} "
        f"predicted, {_share(plan)} of the bound ({show_seconds(plan.bound_seconds)})"
    )


def _prediction_of_flow(plan: Decisions) -> str:
    """The configuration of a plan for inference, and what is predicted of a steady flow."""
    counted = [f"{plan.replicas} replicas"] if plan.replicas > 1 else []
    number = len(plan.stages)
    counted.append(f"{number} stage{'s' * (number > 1)}")
    rate = f"{_rate(plan.batches_per_second)} batches a second"
    if plan.num_microbatches > 1:
        rate += f" ({_rate(plan.microbatches_per_second)} micro-batches)"
    return (
        f"inference, {', '.join(counted)}, {_counted(plan)}{_boundaries(plan)}: "
        f"{show_seconds(plan.predicted_step_seconds)} a batch predicted in a steady flow, {rate}, "
        f"{_share(plan)} of the bound ({show_seconds(plan.bound_seconds)}); "
        f"one batch alone takes {show_seconds(plan.way_seconds)}"
    )


def _rate(number: float) -> str:
    """How many there are in a second, with three digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def stages(plan: Decisions, width: int | None = None) -> list[str]:
    """A line for every stage, and what the columns do not say; no longer than `width`."""
    if plan.inference:
        forwards = [_row_of_flow(number, stage) for number, stage in enumerate(plan.stages)]
        return aligned([_FORWARD_HEADING, *forwards], _STAGE_TEXTS[:2], width)
    rows = [_row(number, stage) for number, stage in enumerate(plan.stages)]
    return aligned([_STAGE_HEADING, *rows], _STAGE_TEXTS, width)


def flow(plan: Decisions) -> list[str]:
    """A line per worker of a plan for inference, a cell per unit of time: which batch is where.

    A cell is `F` and the number of the batch, with that of the micro-batch after it where there are
    several: `F2.0`. Every forward is drawn as one unit of time. Only the first batches are shown.
    """
    stages, has_several = len(plan.stages), plan.num_microbatches > 1
    lines = []
    for replica in range(plan.replicas):
        share = plan.share(replica)
        batches = range(1 + -(-2 * stages // len(share)))
        cells = [f"F{b}.{m}" if has_several else f"F{b}" for b in batches for m in share]
        lines += [[".."] * stage + cells[: len(cells) - stage] for stage in range(stages)]
    width = max(len(cell) for line in lines for cell in line)
    digits = len(str(len(lines) - 1))
    return [
        f"worker {worker:>{digits}} | {' '.join(cell.ljust(width) for cell in line)} …"
        for worker, line in enumerate(lines)
    ]


def replicas(plan: Decisions, width: int | None = None) -> list[str]:
    """A line for every replica, if they have other devices; no longer than `width`."""
    if not plan.other_stages:
        return []
    each = plan.workers_per_replica
    rows = [_REPLICA_HEADING]
    for replica in range(plan.replicas):
        own, share = plan.stages_of(replica), len(plan.share(replica))
        devices = plan.devices[replica * each : (replica + 1) * each]
        slowest = max(stage.seconds for stage in own)
        memory = max(stage.memory_bytes for stage in own)
        row = f"{replica}", ", ".join(devices), f"{share}", show_seconds(slowest)
        rows.append((*row, show_bytes(memory)))
    return aligned(rows, (1,), width)


def considered(plan: Decisions, width: int | None = None) -> list[str]:
    """A line for the best of every way and schedule, the fastest first; no longer than `width`.

    Where plans differ in the intra-op threads of their workers, a column says how many.
    """
    best: dict[tuple[str, str, int, int], Candidate] = {}
    for found in plan.considered:
        schedule = found.schedule if found.stages > 1 else ""  # they are all the same with one
        kind = found.way, schedule, found.replicas, found.threads
        if kind not in best or found.why == "chosen":  # others may be as fast
            best[kind] = found
    has_threads = len({candidate.threads for candidate in plan.considered}) > 1
    heading = (*_CONSIDERED_HEADING[:1], "threads", *_CONSIDERED_HEADING[1:])
    rows = [heading, *(_considered(candidate) for candidate in best.values())]
    texts = (0, 7)
    if not has_threads:
        rows, texts = [(row[0], *row[2:]) for row in rows], (0, 6)
    lines = aligned(rows, texts, width)
    others = len(plan.considered) - len(best)
    if others:
        lines.append(f"and {others} other micro-batch counts and stages; plan.considered has all")
    return lines


def _predicted(plan: Decisions) -> tuple[float, float, float]:
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


def _counted(plan: Decisions) -> str:
    size = f"{plan.microbatch_size} row{'s' * (plan.microbatch_size > 1)}"
    if plan.num_microbatches == 1:
        return f"1 micro-batch of {size}"
    upto = "up to " if plan.batch_size % plan.num_microbatches else ""
    return f"{plan.num_microbatches} micro-batches of {upto}{size}"


def _boundaries(plan: Decisions) -> str:
    return f", boundaries in {plan.boundary_dtype}" if plan.boundary_dtype else ""


def _share(plan: Decisions) -> str:
    return f"{plan.bound_seconds / plan.predicted_step_seconds:.0%}"


def _what(number: int, stage: StagePlan) -> tuple[str, str, str, str]:
    """The first cells of a stage's line: which it is, and what is in it."""
    return (
        str(number),
        f"{stage.worker} {stage.device}",
        stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}",
        show_bytes(stage.weight_bytes),
    )


def _row(number: int, stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.calls
    again = sum(b - a for a, b in stage.recompute)
    return (
        *_what(number, stage),
        show_bytes(stage.input_bytes),
        show_seconds(stage.forward_seconds),
        show_seconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
        f"recomputes {again} of {last - first} calls" if again else "",
    )


def _row_of_flow(number: int, stage: StagePlan) -> tuple[str, ...]:
    """A line for a stage of a plan for inference."""
    return (
        *_what(number, stage),
        show_bytes(stage.state_bytes),
        show_bytes(stage.input_bytes),
        show_seconds(stage.forward_seconds),
        show_bytes(stage.memory_bytes),
    )


def _considered(found: Candidate) -> tuple[str, ...]:
    seconds = found.predicted_step_seconds
    if found.way == "pipeline":
        name = found.schedule or "stages"  # of a plan for inference
    else:
        name = f"{found.way}, {found.schedule}" if found.stages > 1 else found.way
    return (
        name,
        str(found.threads or "-"),
        str(found.replicas),
        str(found.stages),
        str(found.num_microbatches),
        "-" if seconds is None else show_seconds(seconds),
        show_bytes(found.memory_bytes) if found.memory_bytes else "-",
        found.why,
    )
