"""The proof that a schedule works, made before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.walk import placement, walk


@dataclass(frozen=True)
class Check:
    """What a sound schedule needs.

    Attributes:
        placement: `placement[s]` is the worker of stage `s`.
        in_flight: `in_flight[s]` is the largest number of micro-batches that stage `s` holds at
            once, their forward done and their backward not. It is what decides its memory.
    """

    placement: tuple[int, ...]
    in_flight: tuple[int, ...]


def check(schedule: Schedule) -> Check:
    """Proves that `schedule` does all of its work, once, in order, and never deadlocks.

    Every stage lives on one worker and runs the forward and the backward of every micro-batch
    exactly once, both in micro-batch order: links are first in, first out, and a gradient is
    summed in the order in which one device would sum it. Then the lists are executed without
    doing the work, which finds every deadlock, whatever the actions' durations.

    Raises:
        ScheduleError: naming the worker, the action, and what it waits for.
    """
    homes = placement(schedule)
    for stage, worker in enumerate(homes):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            _check_order(schedule, worker, stage, kind)
    for _ in walk(schedule):
        pass
    peaks = (_peak(schedule.workers[worker], stage) for stage, worker in enumerate(homes))
    return Check(homes, tuple(peaks))


def _check_order(schedule: Schedule, worker: int, stage: int, kind: Kind) -> None:
    """Raises unless `worker` runs `kind` of `stage` for micro-batches 0, 1, ..., m-1."""
    found = [
        action.microbatch
        for action in schedule.workers[worker]
        if action.stage == stage and action.kind is kind
    ]
    wanted = range(schedule.num_microbatches)
    if found == list(wanted):
        return
    who = f"{schedule.name}: worker {worker}"
    for microbatch, times in Counter(found).items():
        action = Action(kind, stage, microbatch)
        if microbatch not in wanted:
            raise ScheduleError(f"{who} runs {action}, but the micro-batches are 0 to {wanted[-1]}")
        if times > 1:
            raise ScheduleError(f"{who} runs {action} {times} times; once is right")
    for microbatch in wanted:
        if microbatch not in found:
            raise ScheduleError(f"{who} never runs {Action(kind, stage, microbatch)}")
    index = next(index for index in wanted if found[index] != index)
    early, due = Action(kind, stage, found[index]), Action(kind, stage, index)
    raise ScheduleError(f"{who} runs {early} before {due}; micro-batches must come in order")


def _peak(actions: tuple[Action, ...], stage: int) -> int:
    """The largest number of micro-batches of `stage` between their forward and their backward."""
    held = peak = 0
    for action in actions:
        if action.stage == stage:
            held += 1 if action.kind is Kind.FORWARD else -1
            peak = max(peak, held)
    return peak
