"""The state of a running pipeline, read from its board."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, NamedTuple

from penstock.board.memory import Counted, Reading
from penstock.board.process import STATE, fields, is_alive, memory_of
from penstock.board.runs import Description, Run, Worker
from penstock.display.tables import aligned
from penstock.units import show_bytes, show_seconds

_HEADING = ("worker", "doing", "for", "busy", "waited", "passes", "memory", "peak", "limit")
_LEFT = (0, 1)
_BUSY = 3  # the column with the share of work
_SIDES = {True: "text-align:left", False: "text-align:right"}
_LINE = 160  # characters of an event in a line


class Happened(NamedTuple):
    """Something that happened in a run.

    Attributes:
        at: when, in seconds since 1970.
        step: after so many steps.
        what: in words.
    """

    at: float
    step: int
    what: str

    def __str__(self) -> str:
        text = self.what.strip()
        first = text.partition("\n")[0]
        if first != text or len(first) > _LINE:
            first = f"{first[: _LINE - 1].rstrip()}…"
        return f"after step {self.step}: {first}"


class News(NamedTuple):
    """What a process says of its pipeline that is not on the board: see `Status`."""

    notes: tuple[str, ...] = ()
    events: tuple[Happened, ...] = ()


@dataclass(frozen=True)
class WorkerStatus:
    """What one worker is doing, and has done.

    Attributes:
        number: of the member; no other has it or has had it.
        device: its own, as its machine names it.
        replica: whose stages it runs.
        stages: that it runs.
        pid: the process that it is, or that it is a thread of.
        host: the name of its machine.
        what: `"forward"`, `"backward"`, or what it does amid one: `"loss"`, `"recomputation"`,
            `"send"`; otherwise `"start"`, `"optimizer step"`, `"exchange with other replicas"`, or
            empty between passes.
        stage: at which it works now; `None` between passes.
        microbatch: on which one.
        waits: whether it waits for other workers.
        waits_for: the number of the worker whose values it waits for, if it waits for one.
        amid: whether it waits in the middle of its work, such as for its turn among replicas, and
            not for the values that it begins with.
        seconds: how long it has been doing that.
        worked_seconds: how long it has worked in passes, in all.
        waited_seconds: that it has waited for others in passes, in all.
        passes: that it has completed.
        memory: bytes of its device's memory that are in use; of a CPU worker's process, which
            threads share. 0 if it is not known here.
        most_memory: the most that were.
        limit: bytes that it may hold; 0 if that was not given.
        state: `"running"`, `"stopped"` by a signal, `"gone"`, or `"elsewhere"` if its record is on
            another machine or in another process's board.
    """

    number: int
    device: str
    replica: int
    stages: tuple[int, ...]
    pid: int
    host: str
    what: str
    stage: int | None
    microbatch: int | None
    waits: bool
    waits_for: int | None
    amid: bool
    seconds: float
    worked_seconds: float
    waited_seconds: float
    passes: int
    memory: int
    most_memory: int
    limit: int
    state: str

    @property
    def busy(self) -> float | None:
        """The share of its time in passes in which it has worked; `None` before the first."""
        whole = self.worked_seconds + self.waited_seconds
        return self.worked_seconds / whole if whole else None

    @property
    def doing(self) -> str:
        """What it is doing, in words."""
        if self.state in ("stopped", "gone"):
            return {"stopped": "stopped by a signal", "gone": "its process has ended"}[self.state]
        if self.state == "elsewhere":
            return "not seen from here"
        if self.stage is None:
            return self.what or "idle"
        place = f"{self.what} of micro-batch {self.microbatch} in stage {self.stage}"
        if not self.waits:
            return place
        if self.amid:
            return f"waits for others in the {place}"
        return f"waits{'' if self.waits_for is None else f' for worker {self.waits_for}'}: {place}"


@dataclass(frozen=True)
class Status:
    """The state of a running pipeline. `str()` gives a table of it.

    Attributes:
        model: the class of the model.
        plan: in words.
        pid: the process that drives it.
        steps: passes that computed gradients, so far.
        evaluations: passes without gradients, so far.
        rows: of the batches of all steps.
        tokens: of the batches of all steps: elements of the first integer input with at least two
            dimensions; 0 if there is none.
        step_seconds: the median time of the passes of the latest 64 steps, without the optimizer;
            `None` before the first.
        planned_step_seconds: the same of those of them whose batch had the size for which the plan
            was made; `None` if there are none.
        predicted_seconds: of a step, by the plan.
        bound_seconds: the lower bound of the plan.
        steps_per_second: of the latest 64 steps, with everything that comes between them; `None`
            before the second.
        samples_per_second: rows of these.
        tokens_per_second: tokens of these; `None` if there are none.
        pass_seconds: for how long a pass has been under way; `None` between passes.
        workers: each of them, by number.
        ranks: how many processes run the script, of which each sees its own workers.
        rank: which of these this one is.
        notes: what else there is to say, such as that the plan holds no more.
        events: what has happened lately, such as that a worker was replaced, oldest first.
    """

    model: str
    plan: str
    pid: int
    steps: int
    evaluations: int
    rows: int
    tokens: int
    step_seconds: float | None
    predicted_seconds: float
    bound_seconds: float
    steps_per_second: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    pass_seconds: float | None
    workers: tuple[WorkerStatus, ...]
    ranks: int = 1
    rank: int = 0
    notes: tuple[str, ...] = ()
    events: tuple[Happened, ...] = ()
    planned_step_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        found = asdict(self)
        for worker, status in zip(found["workers"], self.workers, strict=True):
            worker |= {"busy": status.busy, "doing": status.doing}
        found["events"] = [event._asdict() for event in self.events]
        return found

    @property
    def headline(self) -> list[str]:
        """A few lines without the workers."""
        rank = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        lines = [f"{self.model} (process {self.pid}{rank}): {self.plan}"]
        counts = [_counted(self.steps, "step", "steps")]
        if self.evaluations:
            counts.append(f"{_counted(self.evaluations, 'pass', 'passes')} without gradients")
        if self.steps_per_second is not None:
            counts.append(f"{self.steps_per_second:.3g} steps/s")
        if self.samples_per_second is not None:
            counts.append(f"{self.samples_per_second:.3g} samples/s")
        if self.tokens_per_second is not None:
            counts.append(f"{self.tokens_per_second:.3g} tokens/s")
        lines.append(", ".join(counts))
        if self.step_seconds is not None:
            against = ""
            if self.predicted_seconds and self.planned_step_seconds is not None:
                ratio = self.planned_step_seconds / self.predicted_seconds
                predicted = show_seconds(self.predicted_seconds)
                against = f", {ratio:.2f} times the predicted {predicted}"
            lines.append(f"a step takes {show_seconds(self.step_seconds)}{against}")
        if self.pass_seconds is not None:
            lines.append(f"a pass has been under way for {show_seconds(self.pass_seconds)}")
        return [*lines, *self.notes, *map(str, self.events)]

    def table(self) -> list[tuple[str, ...]]:
        """The workers as rows of text, below a heading."""
        first: dict[tuple[str, int, str], int] = {}
        for worker in self.workers:
            first.setdefault((worker.host, worker.pid, worker.device), worker.number)
        return [
            _HEADING,
            *(_row(worker, worker.number in first.values()) for worker in self.workers),
        ]

    def __str__(self) -> str:
        return "\n".join([*self.headline, "", *aligned(self.table(), _LEFT)])

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        used = [k for k, column in enumerate(zip(*rows, strict=True)) if any(column)]
        cells = ["".join(f"<th style={_SIDES[k in _LEFT]}>{heading[k]}</th>" for k in used)]
        for row, worker in zip(rows, self.workers, strict=True):
            shown = {k: escape(row[k]) for k in used}
            if worker.busy is not None:
                shown[_BUSY] = f"<meter value={worker.busy:.3f}></meter> {shown[_BUSY]}"
            cells.append("".join(f"<td style={_SIDES[k in _LEFT]}>{shown[k]}</td>" for k in used))
        first, *lines = map(escape, self.headline)
        return (
            f"<p><b>{first}</b><br>{'<br>'.join(lines)}</p>"
            f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        )


class Process(NamedTuple):
    """What is known of a worker's process on its own machine.

    Attributes:
        memory: bytes that it has resident; 0 if that is not known.
        most_memory: the most that it had.
        state: `"running"`, `"stopped"` or `"gone"`.
    """

    memory: int
    most_memory: int
    state: str


def process_of(pid: int) -> Process:
    """What is known of a process of this machine."""
    return Process(*memory_of(pid), _state(pid))


def status_of(
    description: Description,
    readings: Mapping[int, Reading],
    counted: Counted,
    processes: Mapping[int, Process] | None = None,
) -> Status:
    """The state of a pipeline now.

    Args:
        description: what it is.
        readings: of its workers' records, by number, as far as they are seen.
        counted: its passes.
        processes: of its workers, by number, if it is on another machine; `None` if it is on this.
    """
    now, pace = time.monotonic_ns(), _Pace(counted)
    return Status(
        model=description.model,
        plan=description.plan,
        pid=description.pid,
        steps=counted.steps,
        evaluations=counted.others,
        rows=counted.rows,
        tokens=counted.tokens,
        step_seconds=counted.step_seconds,
        predicted_seconds=description.predicted_seconds,
        bound_seconds=description.bound_seconds,
        steps_per_second=pace.per_second([1] * len(counted.latest)),
        samples_per_second=pace.per_second([step.rows for step in counted.latest]),
        tokens_per_second=pace.per_second([step.tokens for step in counted.latest]) or None,
        pass_seconds=(now - counted.begun) / 1e9 if counted.begun else None,
        workers=tuple(
            _worker(
                worker,
                readings.get(worker.number),
                description,
                now,
                _here(worker, description) if processes is None else processes.get(worker.number),
            )
            for worker in description.workers
        ),
        ranks=description.ranks,
        rank=description.rank,
        planned_step_seconds=counted.planned_seconds,
    )


def status_here(run: Run) -> Status:
    """The same of one process's run, as its own board says."""
    return status_of(run.description, run.readings(), run.board.counted())


class _Pace:
    """How fast the latest steps were."""

    def __init__(self, counted: Counted) -> None:
        self._latest = counted.latest

    def per_second(self, amounts: Sequence[int]) -> float | None:
        """How much of this per second, from the end of the first of them on."""
        if len(self._latest) < 2:
            return None
        span = self._latest[-1].end - self._latest[0].end
        return 1e9 * sum(amounts[1:]) / span if span else None


def _here(worker: Worker, description: Description) -> Process:
    """What is known here of the process of a worker that is seen: a far one has answered."""
    if worker.host == description.host:
        return process_of(worker.pid)
    return Process(0, 0, "running")


def _worker(
    worker: Worker,
    reading: Reading | None,
    description: Description,
    now: int,
    process: Process | None,
) -> WorkerStatus:
    memory, most, state = process or Process(0, 0, "elsewhere")
    if reading is None:
        reading, state = Reading.nothing(), "elsewhere"
    if reading.most_held:
        memory, most = reading.held, reading.most_held
    activity = reading.activity
    return WorkerStatus(
        number=worker.number,
        device=worker.device,
        replica=worker.replica,
        stages=worker.stages,
        pid=worker.pid,
        host=worker.host,
        what=activity.what,
        stage=activity.stage,
        microbatch=activity.microbatch,
        waits=activity.waits,
        waits_for=_awaited(worker, reading, description),
        amid=activity.amid,
        seconds=(now - reading.since) / 1e9 if reading.since else 0.0,
        worked_seconds=reading.worked / 1e9,
        waited_seconds=reading.waited / 1e9,
        passes=reading.passes,
        memory=memory,
        most_memory=most,
        limit=worker.limit,
        state=state,
    )


def _awaited(worker: Worker, reading: Reading, description: Description) -> int | None:
    """The worker whose values this one waits for: the stage before, or behind in a backward."""
    activity, placement = reading.activity, description.placement
    if not activity.waits or activity.amid or activity.stage is None:
        return None
    other = activity.stage + (-1 if activity.what == "forward" else 1)
    if not 0 <= other < len(placement):
        return None
    for each in description.workers:
        if each.replica == worker.replica and each.place == placement[other]:
            return each.number
    return None


def _state(pid: int) -> str:
    if not is_alive(pid, 0):
        return "gone"
    found = fields(pid)
    return "stopped" if found and found[STATE] == "T" else "running"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _row(worker: WorkerStatus, has_own: bool) -> tuple[str, ...]:
    """A worker as a row of text.

    Args:
        worker: what it does.
        has_own: whether no worker above it has the same memory.
    """
    memory, most = worker.memory, worker.most_memory
    busy = "" if worker.busy is None else f"{100 * worker.busy:.0f}%"
    is_seen = worker.state != "elsewhere"
    return (
        f"{worker.number} {worker.device}",
        worker.doing,
        show_seconds(worker.seconds) if is_seen and worker.what else "",
        busy,
        show_seconds(worker.waited_seconds) if worker.waited_seconds else "",
        str(worker.passes) if is_seen else "",
        (show_bytes(memory) if has_own else "shared") if memory else "",
        (show_bytes(most) if has_own else "shared") if most else "",
        show_bytes(worker.limit) if worker.limit else "",
    )
