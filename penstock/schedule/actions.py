"""Actions, schedules and timelines: who does what in which order, and when, as plain data.

A `Schedule` is one ordered list of `Action`s per worker. It says nothing about how long an
action takes or what it computes, so it can be drawn, checked, simulated and compared without a
model and without torch. A `Timeline` says when every action began and ended.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Event(NamedTuple):
    """`worker` ran `action` from `start` to `end`, in seconds since the step began."""

    worker: int
    action: Action
    start: float
    end: float


class Phase(NamedTuple):
    """`worker` did one thing from `start` to `end`, in seconds since the step began.

    Attributes:
        worker: who.
        what: `"forward"`, `"backward"`, `"input half"`, `"weight half"`; a part of one of these,
            which interrupts it: `"loss"` (with the metrics), `"recomputation"`, `"send"`, or
            `"turn"`, a wait for other replicas; `"wait"` for the values that an action begins with;
            or `"exchange"` with other replicas.
        action: in which, or before which; `None` if there is none.
        start: when it began.
        end: when it ended.
    """

    worker: int
    what: str
    action: Action | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The seconds between start and end."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Who did what in one step, and when: predicted by the simulator, or recorded by the engine.

    Attributes:
        num_workers: how many workers took part, idle ones included.
        events: what they ran, in any order.
        phases: what they did in more detail, if it was recorded: parts of actions, and waits.
    """

    num_workers: int
    events: Sequence[Event]
    phases: Sequence[Phase] = ()

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last event, in seconds."""
        return max((event.end for event in self.events), default=0.0)

    def busy(self) -> tuple[float, ...]:
        """The seconds that each worker spent running actions."""
        totals = [0.0] * self.num_workers
        for event in self.events:
            totals[event.worker] += event.end - event.start
        return tuple(totals)
