"""Every schedule of a tiny pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from penstock.errors import ScheduleError
from penstock.schedule import Action, Costs, Kind, Schedule, check
from penstock.simulate import Network, simulate


def step(schedule: Schedule, costs: Costs) -> float:
    """The seconds of a step."""
    return simulate(schedule, costs.seconds, Network.of(costs)).seconds


@cache
def every_schedule(homes: tuple[int, ...], m: int, split: bool) -> list[Schedule]:
    """All that `check` accepts."""
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD)
    per_worker = []
    for worker in sorted(set(homes)):
        own = [stage for stage, home in enumerate(homes) if home == worker]
        per_worker.append(list(orders([(kind, s) for s in own for kind in kinds], m)))
    found = []
    for lists in product(*per_worker):
        schedule = Schedule("any", len(homes), m, lists)
        try:
            check(schedule)
        except ScheduleError:
            continue
        found.append(schedule)
    return found


def orders(columns: list[tuple[Kind, int]], m: int) -> Iterator[tuple[Action, ...]]:
    """All ways to run every column `m` times, none of a stage's kinds before the one before it."""

    def extend(counts: tuple[int, ...], done: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if len(done) == m * len(columns):
            yield done
        for index, (kind, stage) in enumerate(columns):
            waits = kind is not Kind.FORWARD and counts[index] >= counts[index - 1]
            if counts[index] < m and not waits:
                more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                yield from extend(more, (*done, Action(kind, stage, counts[index])))

    return extend((0,) * len(columns), ())
