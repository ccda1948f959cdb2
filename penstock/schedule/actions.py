"""Actions and schedules: the order in which every worker does its work, as plain data.

A `Schedule` is one ordered list of `Action`s per worker. It says nothing about how long an
action takes or what it computes, so it can be drawn, checked, simulated and compared without a
model and without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ScheduleError


class Kind(StrEnum):
    """What an action computes.

    A backward is whole (`B`), or it is two halves: `I`, the gradients of the stage's inputs, which
    the stage before waits for, and later `W`, those of its weights, which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """One unit of work: `kind` of `microbatch` on `stage`, both counted from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """One ordered list of actions per worker.

    Attributes:
        name: the schedule's name in the literature, e.g. `"1f1b"`.
        num_stages: the number of stages, `p`.
        num_microbatches: the number of micro-batches, `m`.
        workers: `workers[w]` is what worker `w` runs, in order.

    Raises:
        ScheduleError: there is no stage or no micro-batch.
    """

    name: str
    num_stages: int
    num_microbatches: int
    workers: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        check_size(self.name, self.num_stages, self.num_microbatches)


def check_size(name: str, num_stages: int, num_microbatches: int) -> None:
    """Raise unless there is something to schedule.

    Raises:
        ScheduleError: there is no stage or no micro-batch.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{name} needs at least one stage and one micro-batch, "
            f"got num_stages={num_stages} and num_microbatches={num_microbatches}"
        )
