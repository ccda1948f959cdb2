"""What to say when nothing fits the memory: by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from msgspec.structs import replace as replace_fields

from penstock.errors import PlanError, ScheduleError
from penstock.plan.candidates import cutter_for, usual_stages
from penstock.plan.layout import Layout, Memory
from penstock.plan.partition import CapacityError
from penstock.plan.request import Request
from penstock.profile.data import Profile
from penstock.schedule import SCHEDULES
from penstock.units import show_bytes

_FRUGAL = "1f1b"  # of the schedules with whole backwards the one that holds least
_TIMES_DEVICES = 4  # more than so many times as many are not tried


class NothingFitsError(PlanError):
    """Nothing fits the memory. By how much, and what would, is found only if it is explained.

    Args:
        profile: what was measured.
        request: what was requested.
        memory: what training holds.
        shorts: what was tried, with the worker of every stage.

    Attributes:
        replicas: how many replicas there are of what was tried.
        batch_size: rows of the batch that they share.
    """

    def __init__(
        self,
        profile: Profile,
        request: Request,
        memory: Memory,
        shorts: Sequence[tuple[CapacityError, Sequence[int]]],
    ) -> None:
        super().__init__("no plan fits the memory")
        self.profile, self.request, self.memory = profile, request, memory
        self.shorts = shorts
        self.replicas, self.batch_size = 1, profile.batch_size

    def explained(self) -> PlanError:
        """The error that says how close it is, and what would fit."""
        profile, request, memory = self.profile, self.request, self.memory
        fewest = min(len(placement) for _, placement in self.shorts)
        few = [short for short in self.shorts if len(short[1]) == fewest]
        closest, placement = min(few, key=lambda short: short[0].shortfall.bytes)
        found = closest.shortfall
        device = profile.devices[placement[found.device]]
        have = found.needed - found.bytes
        first, last = found.calls
        changes = list(self._changes())
        if not changes:
            every = self._options()
            most = _with(request, every.values())
            missing = show_bytes(_missing(profile, most, memory))
            usual = list(every)[:2]
            named = [t for t, c in every.items() if t in usual or _with(request, [c]) != request]
            changes = [f"{missing} more a worker, with {' and '.join(named)}"]
        return PlanError(
            f"{self}: at best, the stage of {profile.labels[first]} to "
            f"{profile.labels[last - 1]} takes {show_bytes(found.needed)}, and {device} may hold "
            f"{show_bytes(have)}: {show_bytes(found.bytes)} too little. "
            f"What would fit: {'; '.join(changes)}"
        )

    def _changes(self) -> Iterator[str]:
        """The fewest changes to the request that would make it possible; and more devices."""
        profile, request, memory = self.profile, self.request, self.memory
        options = {
            text: changed
            for text, changed in self._options().items()
            if _with(request, [changed]) != request
        }
        for number in range(1, len(options) + 1):
            working = [
                some
                for some in combinations(options, number)
                if _missing(profile, _with(request, [options[t] for t in some]), memory) == 0
            ]
            yield from map(" with ".join, working)
            if working:
                break
        devices = profile.devices
        most = _TIMES_DEVICES * len(devices) if request.cuts is None else 0
        for more in range(len(devices) + 1, most + 1):
            longer = tuple(devices[k % len(devices)] for k in range(more))
            if _missing(replace_fields(profile, devices=longer), request, memory) == 0:
                yield f"{more * self.replicas} devices like these"
                return

    def _options(self) -> dict[str, dict[str, Any]]:
        """What may be changed, in words."""
        count = min(self.batch_size, self.profile.batch_size * self.replicas)
        return {
            'recompute="auto"': {"recompute": "auto"},
            f"num_microbatches={count}": {"num_microbatches": self.profile.batch_size},
            'schedule="auto"': {"schedule": "auto"},
            "cuts that Penstock chooses": {"cuts": None},
        }


def _with(request: Request, changes: Iterable[dict[str, Any]]) -> Request:
    return replace(request, **{name: value for each in changes for name, value in each.items()})


def _missing(profile: Profile, request: Request, memory: Memory) -> float:
    """By how many bytes a worker has too little at best; for `"auto"` by a frugal schedule."""
    workers, schedule = len(profile.devices), request.schedule
    wanted = request.num_microbatches
    layout = Layout(profile, profile.batch_size if wanted == "auto" else wanted)
    again = request.recomputed(profile.labels, profile.forbidden)
    name = _FRUGAL if schedule in ("auto", "fitted") else schedule
    try:
        cuts = request.positions(profile.labels, profile.forbidden, workers)
        stages = _stages(request, name, workers) if cuts is None else len(cuts) + 1
        cutter_for(layout, name, stages, memory, again, cuts).best(1.0)
    except CapacityError as error:
        return error.shortfall.bytes
    except (PlanError, ScheduleError):  # there are not enough places to cut, or micro-batches
        return float("inf")
    return 0.0


def _stages(request: Request, name: str, workers: int) -> int:
    """With how many stages a schedule is tried, if the cuts are free."""
    wanted = request.stages_per_worker
    if wanted != "auto" and SCHEDULES[name].takes(wanted * workers, workers):
        return wanted * workers
    return usual_stages(name, workers)
