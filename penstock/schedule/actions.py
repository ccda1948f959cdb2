"""Actions and schedules: the order in which every worker does its work, as plain data.

A `Schedule` is one ordered list of `Action`s per worker. It says nothing about how long an
action takes or what it computes, so it can be drawn, checked, simulated and compared without a
model and without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"


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
    """

    name: str
    num_stages: int
    num_microbatches: int
    workers: tuple[tuple[Action, ...], ...]
