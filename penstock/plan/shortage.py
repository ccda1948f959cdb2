"""What to say when nothing fits the memory: by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from penstock.errors import PlanError
from penstock.plan.candidates import in_flight
from penstock.plan.cutting import Cutter
from penstock.plan.layout import Layout, Memory
from penstock.plan.partition import CapacityError
from penstock.plan.request import Request
from penstock.profile.data import Profile
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
        changes = list(_changes(profile, request, memory))
        if not changes:
            count = profile.batch_size
            most = replace(request, recompute="auto", num_microbatches=count, cuts=None)
            missing = show_bytes(_missing(profile, most, memory))
            changes = [
                f'{missing} more a worker, with recompute="auto" and num_microbatches={count}'
            ]
        return PlanError(
            f"{self}: at best, the stage of {profile.labels[first]} to "
            f"{profile.labels[last - 1]} takes {show_bytes(found.needed)}, and {device} may hold "
            f"{show_bytes(have)}: {show_bytes(found.bytes)} too little. "
            f"What would fit: {'; '.join(changes)}"
        )


def _changes(profile: Profile, request: Request, memory: Memory) -> Iterator[str]:
    """Changes to the request that would make it possible, each on its own, or all in one."""
    recomputing = replace(request, recompute="auto")
    count = profile.batch_size
    finer = replace(request, num_microbatches=count)
    changes = {'recompute="auto"': recomputing, f"num_microbatches={count}": finer}
    both = replace(recomputing, num_microbatches=count)
    alone = [text for text, changed in changes.items() if changed != request]
    working = [text for text in alone if _fits(profile, changes[text], memory)]
    yield from working
    if not working and both not in (request, recomputing, finer) and _fits(profile, both, memory):
        yield " with ".join(changes)
    if request.cuts is not None:
        free = replace(both, cuts=None)
        if _fits(profile, free, memory):
            yield "cuts that Penstock chooses"
        return
    devices = profile.devices
    for more in range(len(devices) + 1, _TIMES_DEVICES * len(devices) + 1):
        longer = tuple(devices[k % len(devices)] for k in range(more))
        if _fits(replace_fields(profile, devices=longer), request, memory):
            yield f"{more} devices like these"
            return


def _fits(profile: Profile, request: Request, memory: Memory) -> bool:
    """Whether the most frugal schedule has a partition for it."""
    return _missing(profile, request, memory) == 0


def _missing(profile: Profile, request: Request, memory: Memory) -> float:
    """By how many bytes a worker has too little for the most frugal schedule, at best."""
    workers = len(profile.devices)
    wanted = request.num_microbatches
    count = profile.batch_size if wanted == "auto" else wanted
    flying = in_flight(_FRUGAL, workers, count, workers)
    layout = Layout(profile, count)
    again = request.recomputed(profile.labels, profile.forbidden)
    cutter = Cutter(layout, range(workers), flying, memory, again)
    try:
        cutter.best(1.0)
    except CapacityError as error:
        return error.shortfall.bytes
    except PlanError:  # there are not enough places to cut
        return float("inf")
    return 0.0
