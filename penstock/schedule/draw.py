"""A schedule as text: the staircase that papers draw."""

from __future__ import annotations

from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.walk import walk

_IDLE = ".."


def draw(schedule: Schedule) -> str:
    """One line per worker, one cell per unit of time when every action takes one unit.

    A cell is the action's kind and the micro-batch, with the stage between them where a worker has
    several: `F2`, or `F1.2` for stage 1. A worker waits in `..`:

        worker 0 | F0 F1 .. B0 .. B1
        worker 1 | .. F0 B0 F1 B1 ..

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    rows: list[list[str]] = [[] for _ in schedule.workers]
    # A micro-batch is in one place at a time: its next action starts when its last one ended.
    ready = [0] * schedule.num_microbatches
    several = any(len({action.stage for action in actions}) > 1 for actions in schedule.workers)
    for worker, action in walk(schedule):
        row = rows[worker]
        # A weight half comes after its own worker's input half, and nothing comes after it.
        if action.kind is Kind.WEIGHT:
            row.append(_label(action, with_stage=several))
            continue
        row.extend([_IDLE] * (ready[action.microbatch] - len(row)))
        row.append(_label(action, with_stage=several))
        ready[action.microbatch] = len(row)
    return _align(rows)


def _label(action: Action, *, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.kind.value}{action.microbatch}"


def _align(rows: list[list[str]]) -> str:
    length = max(map(len, rows))
    width = max(len(cell) for row in rows for cell in row)
    digits = len(str(len(rows) - 1))
    lines = []
    for worker, row in enumerate(rows):
        cells = row + [_IDLE] * (length - len(row))
        line = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"worker {worker:>{digits}} | {line}".rstrip())
    return "\n".join(lines)
