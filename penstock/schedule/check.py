"""The proof that a schedule works, made before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
            once: those whose forward has begun, and whose backward, or its weight half, has not
            ended. It decides how much memory the stage needs.
        splits_backward: whether a backward comes in halves, `I` and `W`.
    """

    placement: tuple[int, ...]
    in_flight: tuple[int, ...]
    splits_backward: bool = False


# What has to come in micro-batch order on every stage: links are first in, first out, and a
# gradient is summed in the order in which one device would sum it. The first kind of each group is
# the one to name when one is missing.
_ORDERED: tuple[tuple[Kind, ...], ...] = (
    (Kind.FORWARD,),
    (Kind.BACKWARD, Kind.INPUT),
    (Kind.BACKWARD, Kind.WEIGHT),
)


def check(schedule: Schedule) -> Check:
    """Proves that `schedule` does all of its work, once, in order, and never deadlocks.

    Every stage lives on one worker and runs, for every micro-batch, the forward and either the
    backward or both its halves, exactly once. Forwards come in micro-batch order, and so do the
    gradients of the stage's inputs (`B` or `I`), and those of its weights (`B` or `W`). Then the
    lists are executed without doing the work, which finds every deadlock, whatever the actions'
    durations.

    Raises:
        ScheduleError: naming the worker, the action, and what it waits for.
    """
    homes = placement(schedule)
    ordered = [_by_stage(actions) for actions in schedule.workers]
    for stage, worker in enumerate(homes):
        for kinds in _ORDERED:
            _check_order(schedule, worker, stage, kinds, ordered[worker][stage])
    for _ in walk(schedule):
        pass
    return Check(
        placement=homes,
        in_flight=tuple(_peak(ordered[worker][stage]) for stage, worker in enumerate(homes)),
        splits_backward=any(
            action.kind is Kind.INPUT for actions in schedule.workers for action in actions
        ),
    )


def _by_stage(actions: Sequence[Action]) -> Mapping[int, list[Action]]:
    """The actions of every stage, in order."""
    stages: dict[int, list[Action]] = {}
    for action in actions:
        stages.setdefault(action.stage, []).append(action)
    return stages


def _check_order(
    schedule: Schedule, worker: int, stage: int, kinds: tuple[Kind, ...], actions: list[Action]
) -> None:
    """Raises unless the actions of these kinds are those of micro-batches 0, 1, ..., m-1."""
    run = [action for action in actions if action.kind in kinds]
    found = [action.microbatch for action in run]
    wanted = range(schedule.num_microbatches)
    if found == list(wanted):
        return
    who = f"{schedule.name}: worker {worker}"
    for microbatch, times in Counter(found).items():
        first, *others = (action for action in run if action.microbatch == microbatch)
        if microbatch not in wanted:
            raise ScheduleError(f"{who} runs {first}, but the micro-batches are 0 to {wanted[-1]}")
        if first in others:
            raise ScheduleError(f"{who} runs {first} {times} times; once is right")
        if others:
            raise ScheduleError(
                f"{who} runs {first} and {others[0]}; a backward is whole, or it is two halves"
            )
    for microbatch in wanted:
        if microbatch not in found:
            raise ScheduleError(f"{who} never runs {_missing(kinds, stage, microbatch, actions)}")
    index = next(index for index in wanted if found[index] != index)
    due = next(action for action in run if action.microbatch == index)
    raise ScheduleError(f"{who} runs {run[index]} before {due}; micro-batches must come in order")


def _missing(kinds: tuple[Kind, ...], stage: int, microbatch: int, actions: list[Action]) -> Action:
    """The half whose other half is there, or else the whole backward or the forward."""
    whole, *halves = (Action(kind, stage, microbatch) for kind in kinds)
    partner = Kind.INPUT if Kind.WEIGHT in kinds else Kind.WEIGHT
    return halves[0] if halves and Action(partner, stage, microbatch) in actions else whole


def _peak(actions: Sequence[Action]) -> int:
    """The largest number of micro-batches of a stage between their forward and their backward."""
    held = peak = 0
    for kind, _, _ in actions:
        if kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif kind is not Kind.INPUT:
            held -= 1
    return peak
