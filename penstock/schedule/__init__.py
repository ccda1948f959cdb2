"""Schedules: in which order every worker does its work. Pure data, no torch.

One stage per worker:

naive          one micro-batch in the pipeline at a time
gpipe          all forwards, then all backwards
1f1b           one forward, one backward: GPipe's time, less memory
eager-1f1b     1F1B with a deeper warm-up that hides the latency of the links
zero-bubble    1F1B with backwards in halves: weight halves fill the waiting time

Several stages per worker, for shorter bubbles:

interleaved    1F1B on a loop of stages
breadth-first  GPipe on a loop of stages
zero-bubble-v  two stages per worker, there and back, with backwards in halves

Any placement, for stages that are not equal:

fitted         made by a list scheduler for the costs that were measured
"""

from __future__ import annotations

from penstock.schedule.actions import Action, Event, Kind, Phase, Schedule, Timeline
from penstock.schedule.check import Check, check
from penstock.schedule.costs import Costs
from penstock.schedule.draw import draw
from penstock.schedule.fitted import Rules, fitted_pass
from penstock.schedule.recipes import SCHEDULES, Recipe, StagesPerWorker, build, placement_of

__all__ = [
    "SCHEDULES",
    "Action",
    "Check",
    "Costs",
    "Event",
    "Kind",
    "Phase",
    "Recipe",
    "Rules",
    "Schedule",
    "StagesPerWorker",
    "Timeline",
    "build",
    "check",
    "draw",
    "fitted_pass",
    "placement_of",
]
