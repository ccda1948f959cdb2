"""A timeline: who did what, and when. The simulator predicts one, the engine records one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.actions import Action


class Event(NamedTuple):
    """`worker` ran `action` from `start` to `end`, in seconds since the step began."""

    worker: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, in any order.

    Attributes:
        num_workers: how many workers took part, idle ones included.
        events: what they ran.
    """

    num_workers: int
    events: Sequence[Event]

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
