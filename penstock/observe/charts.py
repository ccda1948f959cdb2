"""The geometry of a report's charts, in percent of their width and height."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.account.history import History, StepTimes
from penstock.account.record import CALL, PASS, StepRecord, partition
from penstock.account.replay import Replay
from penstock.board.phases import WORK
from penstock.board.runs import Worker
from penstock.observe.findings import Findings
from penstock.plan.plan import Plan
from penstock.schedule import Action, Phase, Timeline
from penstock.simulate.memory import HeldMemory, memory_over_time
from penstock.units import show_bytes, show_seconds

_POINTS = 600  # of a line, at most: more cannot be distinguished in a chart
_ROOM = 1.08  # above what is largest
_FAR = 2.5  # times the median; what takes longer is drawn at the edge
_NEAR = 3.0  # times what is held; a limit beyond is only named
_DRIVER_NAMES = {CALL: "call", "": "outside"}


@dataclass(frozen=True)
class Mark:
    """A point of a chart that has a name.

    Attributes:
        x: the distance from the left, in percent of the width.
        y: the distance from the top, in percent of the height.
        text: the name of the point.
        beyond: whether the value is above the chart, so that the point is drawn at the upper edge.
    """

    x: float
    y: float
    text: str
    beyond: bool = False


@dataclass(frozen=True)
class Chart:
    """A line, or the area below it.

    Attributes:
        path: the line as an SVG path.
        area: the area below the line as an SVG path; empty if there is none.
        rules: horizontal lines, as the distance from the top in percent of the height, and a label.
        marks: points that have names.
        left: the label at the left end of the horizontal axis.
        right: the label at its right end.
        top: the label at the upper end of the vertical axis.
        title: the title of the chart.
        note: a remark on what the chart leaves out; empty if there is none.
    """

    path: str
    left: str
    right: str
    top: str
    title: str = ""
    area: str = ""
    rules: Sequence[tuple[float, str]] = ()
    marks: Sequence[Mark] = ()
    note: str = ""


# -- history ------------------------------------------------------------------------------


def history_chart(findings: Findings) -> Chart | None:
    """The time of every step; `None` if there are fewer than two points."""
    steps, usual = list(findings.history.steps), findings.step_seconds
    if len(steps) < 2 or not usual:
        return None
    drawn = thinned(steps, _POINTS)
    tallest = max(s.seconds / s.steps for s in drawn)
    marked = max((o.seconds for o in findings.outliers), default=0.0)
    top = _ROOM * max(usual * 1.3, min(max(tallest, marked), _FAR * usual))
    first, last = steps[0].step - steps[0].steps, steps[-1].step
    span = max(1, last - first)

    def x(step: float) -> float:
        return 100 * (step - first) / span

    def y(seconds: float) -> float:
        return 100 * (1 - min(1.0, seconds / top))

    points = [(x(s.step - (s.steps - 1) / 2), y(s.seconds / s.steps)) for s in drawn]
    points += [(x(o.step), y(o.seconds)) for o in findings.outliers]
    marks = [
        Mark(
            x(o.step),
            y(o.seconds),
            f"step {o.step}: {show_seconds(o.seconds)}; {o.why}",
            o.seconds > top,
        )
        for o in findings.outliers
    ]
    if (changed := findings.history.about.since) > first:
        marks.append(Mark(x(changed), y(usual), f"another plan after step {changed}", False))
    return Chart(
        _line(sorted(points)),
        f"step {steps[0].step - steps[0].steps + 1}",
        f"step {last}",
        show_seconds(top),
        rules=[(y(usual), f"median {show_seconds(usual)}")],
        marks=marks,
    )


def thinned(steps: Sequence[StepTimes], most: int) -> list[StepTimes]:
    """At most so many entries, by joining neighbours."""
    size = max(1, -(-len(steps) // most))
    return [_joined(steps[k : k + size]) for k in range(0, len(steps), size)]


def _joined(steps: Sequence[StepTimes]) -> StepTimes:
    slowest = max(steps, key=lambda s: s.slowest_seconds)
    return StepTimes(
        steps[-1].step,
        steps[-1].at,
        sum(s.steps for s in steps),
        sum(s.seconds for s in steps),
        sum(s.pass_seconds for s in steps),
        slowest.slowest,
        slowest.slowest_seconds,
        sum(s.rows for s in steps),
    )


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


# -- memory -------------------------------------------------------------------------------


def memory_charts(record: StepRecord, plan: Plan) -> list[Chart]:
    """What every worker held while a step ran; none if the plan does not say what stages hold."""
    held = [stage.held_bytes for stage in plan.stages]
    if not any(held):
        return []
    timeline = record.timeline
    measured = memory_over_time(timeline, held)
    planned = memory_over_time(plan.timeline(), held)
    return [
        _memory_chart(worker, now, _base(worker, before, plan), plan, record.seconds)
        for worker, (now, before) in enumerate(zip(measured, planned, strict=True))
    ]


def _base(worker: int, planned: HeldMemory, plan: Plan) -> float:
    """What a worker holds besides activations, as planned: weights, gradients, optimizer state."""
    replica, place = divmod(worker, plan.workers_per_replica)
    own = [stage.memory_bytes for stage in plan.stages_of(replica) if stage.worker == place]
    return max(0.0, sum(own) - planned.peak)


def _memory_chart(
    worker: int, memory: HeldMemory, base: float, plan: Plan, seconds: float
) -> Chart:
    most, limit = base + memory.peak, plan.memory_limit
    is_shown = limit is not None and limit <= _NEAR * most
    top = _ROOM * max(most, limit if is_shown and limit else 0.0, 1.0)

    def y(count: float) -> float:
        return 100 * (1 - count / top)

    points, level = [(0.0, y(base))], base
    for at, count in zip(memory.seconds, memory.bytes, strict=True):
        x = 100 * at / seconds
        points += [(x, y(level)), (x, y(base + count))]
        level = base + count
    points.append((100.0, y(level)))
    rules = [(y(base), f"{show_bytes(base)} all the time")] if base else []
    note = ""
    if limit is not None and is_shown:
        rules.append((y(limit), f"limit {show_bytes(limit)}"))
    elif limit is not None:
        note = f"The limit of {show_bytes(limit)} is far above."
    line = _line(points)
    return Chart(
        line,
        "0",
        show_seconds(seconds),
        show_bytes(top),
        title=f"Worker {worker}, {plan.devices[worker]}: at most {show_bytes(most)}",
        area=f"{line}L100 100L0 100Z",
        rules=rules,
        note=note,
    )


def run_memory_charts(history: History) -> list[Chart]:
    """What every worker's process or device held over the run, as it was measured.

    Workers that share a process's memory have one chart. There is none where it is not known.
    """
    samples = history.samples
    shared: dict[tuple[str, int, str], list[Worker]] = {}
    for worker in history.about.description.workers:
        shared.setdefault((worker.host, worker.pid, worker.device), []).append(worker)
    found = []
    for workers in shared.values():
        number = workers[0].number - history.about.description.workers[0].number
        held = [(s.at, s.memory[number]) for s in samples if len(s.memory) > number]
        known = [(at, memory) for at, memory in held if memory]
        if len(known) >= 2:
            most = max(s.most_memory[number] for s in samples if len(s.most_memory) > number)
            found.append(_run_memory_chart(workers, known, most))
    return found


def _run_memory_chart(
    workers: Sequence[Worker], held: Sequence[tuple[float, int]], most: int
) -> Chart:
    begin, end = held[0][0], held[-1][0]
    limit = sum(worker.limit for worker in workers)
    is_shown = 0 < limit <= _NEAR * most
    top = _ROOM * max(most, limit if is_shown else 0)

    def y(count: float) -> float:
        return 100 * (1 - count / top)

    span = max(end - begin, 1e-9)
    size = -(-len(held) // _POINTS)
    thinned = [
        max(held[k : k + size], key=lambda point: point[1]) for k in range(0, len(held), size)
    ]
    line = _line([(100 * (at - begin) / span, y(memory)) for at, memory in thinned])
    numbers = ", ".join(str(worker.number) for worker in workers)
    several = "s" if len(workers) > 1 else ""
    rules = [(y(most), f"most {show_bytes(most)}")]
    if is_shown:
        rules.append((y(limit), f"limit {show_bytes(limit)}"))
    note = f"The limit of {show_bytes(limit)} is far above." if limit and not is_shown else ""
    return Chart(
        line,
        "0",
        show_seconds(end - begin),
        show_bytes(top),
        title=f"Worker{several} {numbers}, {workers[0].device}: at most {show_bytes(most)}",
        area=f"{line}L100 100L0 100Z",
        rules=rules,
        note=note,
    )


# -- staircase ----------------------------------------------------------------------------


def staircase(findings: Findings) -> dict[str, object]:
    """The recorded steps as plain data, for the script of the page to draw.

    A box is `[worker, what, stage, micro-batch, start, seconds, awaited]`, with -1 for no stage or
    micro-batch. `awaited` says in words which action's values the action needs; it may be empty.
    Worker -1 is the script's thread.
    """
    plan, history = findings.plan, findings.history
    typical = findings.typical
    return {
        "workers": [f"worker {n}" for n in range(len(plan.devices))],
        "devices": list(plan.devices),
        "stages": [[stage.first, stage.last] for stage in plan.stages],
        "records": [
            {
                "name": f"step {record.step}: {show_seconds(record.seconds)}"
                f"{' (median)' if record is typical else ''}",
                "seconds": record.seconds,
                "offset": record.passes[0][0] if record.passes else 0.0,
                "boxes": [*_driver_boxes(record), *_boxes(record.timeline, plan)],
            }
            for record in history.records
        ],
        "chosen": next((k for k, r in enumerate(history.records) if r is typical), 0),
        "predicted": {
            "seconds": plan.predicted_step_seconds,
            "boxes": _boxes(plan.timeline(), plan),
        },
    }


def _driver_boxes(record: StepRecord) -> list[list[object]]:
    """What the script's thread did, but for waiting for passes."""
    return [
        [-1, _DRIVER_NAMES.get(what, what), -1, -1, *_span(begin, end, record.begin), ""]
        for what, begin, end in partition(record.driver, record.begin, record.end)
        if what != PASS
    ]


def _span(begin: int, end: int, origin: int) -> tuple[float, float]:
    return round((begin - origin) / 1e9, 7), round((end - begin) / 1e9, 7)


def _boxes(timeline: Timeline, plan: Plan) -> list[list[object]]:
    """A box for everything workers did, waits included, sorted by worker and then by time."""
    replay = Replay(_lists(timeline), plan.workers_per_replica)
    phases = timeline.phases or [
        Phase(worker, WORK[action.kind], action, start, end)
        for worker, action, start, end in timeline.events
    ]
    return [
        [
            worker,
            what,
            -1 if action is None else action.stage,
            -1 if action is None else action.microbatch,
            round(start, 7),
            round(end - start, 7),
            _awaited(replay, worker, action) if action is not None else "",
        ]
        for worker, what, action, start, end in sorted(phases, key=lambda p: (p.worker, p.start))
        if end > start
    ]


def _lists(timeline: Timeline) -> list[list[Action]]:
    """For every worker its actions, in the order in which it began them, each of them once."""
    found: list[dict[Action, None]] = [{} for _ in range(timeline.num_workers)]
    for event in sorted(timeline.events, key=lambda event: event.start):
        found[event.worker].setdefault(event.action)
    return [list(own) for own in found]


def _awaited(replay: Replay, worker: int, action: Action) -> str:
    """The action whose values this one needs, in words; empty if it needs none."""
    before = replay.before.get((worker, action))
    if before is None:
        return ""
    other, (kind, stage, microbatch) = before
    where = "the same worker" if other == worker else f"worker {other}"
    return f"the {WORK[kind]} of micro-batch {microbatch} in stage {stage} on {where}"
