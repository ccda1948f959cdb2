"""Schedules: in which order every worker does its work. Pure data, no torch.

naive       one micro-batch in the pipeline at a time
gpipe       all forwards, then all backwards
1f1b        one forward, one backward: GPipe's time, less memory
eager-1f1b  1F1B with a deeper warm-up that hides the latency of the links
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.check import Check, check
from penstock.schedule.draw import draw
from penstock.schedule.gpipe import gpipe
from penstock.schedule.naive import naive
from penstock.schedule.one_f_one_b import eager_one_f_one_b, one_f_one_b
from penstock.schedule.timeline import Event, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Check",
    "Event",
    "Kind",
    "Schedule",
    "Timeline",
    "build",
    "check",
    "draw",
]

SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_one_f_one_b,
    }
)
"""Every known schedule: `SCHEDULES[name](num_stages, num_microbatches)`."""


def build(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, with one worker per stage.

    Raises:
        ScheduleError: no schedule has that name, or there is no stage or no micro-batch.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; the known ones are {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)
