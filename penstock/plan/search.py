"""Choosing the cuts, the number of micro-batches, the schedule, and what to recompute.

For every number of micro-batches the partition is exact; which of its objectives suits a schedule
best is decided by simulating the schedule on the stages that it gives. The few fastest are then
refined: whether a cut a few calls away suits them better, and whether a schedule fitted to the
stages does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations

from msgspec.structs import replace as replace_fields

from penstock.errors import PlanError
from penstock.plan.advice import nothing_fits
from penstock.plan.alternatives import alternatives
from penstock.plan.by_name import Cut
from penstock.plan.candidates import (
    PREFERENCE,
    STAGES_PER_WORKER,
    Option,
    cutter_for,
    fastest,
)
from penstock.plan.cutting import Cutter
from penstock.plan.device_order import partition_any_order
from penstock.plan.layout import Layout
from penstock.plan.partition import CapacityError
from penstock.plan.plan import Candidate, Plan
from penstock.plan.request import Auto, Recompute, Request
from penstock.profile.data import Profile
from penstock.schedule import SCHEDULES, StagesPerWorker
from penstock.units import show_bytes

_EQUAL = 1.002  # predictions closer than this say nothing
_REFINED = 3  # of the fastest options
_FITTED = 2  # of the fastest options
_BUDGET = 40  # rules that are tried for each
_MOST_MOVES = 20
_FEW = 3  # devices, of which all orders are tried
_REACH = 4  # places on each side of a cut


def plan(
    profile: Profile,
    *,
    num_microbatches: int | Auto = "auto",
    schedule: str = "auto",
    cuts: Sequence[Cut] | None = None,
    recompute: Recompute = "auto",
    memory_limit: int | str | None = None,
    optimizer_state: float = 2.0,
    stages_per_worker: int | Auto = "auto",
    any_order: bool = False,
) -> Plan:
    """The best plan for the profile's devices.

    Args:
        profile: measured costs.
        num_microbatches: as in `Request`, like the others.
        schedule: `"auto"`, or the only one to look at.
        cuts: the only ones to look at.
        recompute: what may be, or which modules are.
        memory_limit: of every worker.
        optimizer_state: bytes for every byte of weights.
        stages_per_worker: for schedules that take any number.
        any_order: whether the devices may be put into another order.

    Returns:
        the plan, with what it is predicted to take and the bound for it.

    Raises:
        PlanError: there are fewer calls, or fewer places to cut, than the devices need; `cuts` has
            one that is not possible; or nothing fits the memory, with what would.
        InputError: an unknown schedule, or more micro-batches than rows.
    """
    request = Request(
        num_microbatches=num_microbatches,
        schedule=schedule,
        cuts=cuts,
        recompute=recompute,
        memory_limit=memory_limit,
        optimizer_state=optimizer_state,
        stages_per_worker=stages_per_worker,
        any_order=any_order,
    )
    return plans(profile, request)[0]


def plans(profile: Profile, request: Request, most: int = 1) -> list[Plan]:
    """The best few plans, the best one first; each has another schedule or count.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    request.check_count(profile.batch_size)
    if not request.any_order:
        return _Search(profile, request).plans(most)
    found: list[Plan] = []
    errors: list[PlanError] = []
    for order in _orders(profile, request):
        try:
            found += _Search(replace_fields(profile, devices=order), request).plans(most)
        except PlanError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return sorted(found, key=lambda plan: plan.predicted_step_seconds)[:most]


def _orders(profile: Profile, request: Request) -> list[tuple[str, ...]]:
    """Orders of the devices, the given one first: all if they are few, or else those that the
    exact partition over orders finds best for some number of micro-batches, memory apart.
    """
    if len(profile.devices) <= _FEW:
        every = dict.fromkeys(permutations(profile.devices))
        return list(dict.fromkeys([profile.devices, *every]))
    kinds = list(dict.fromkeys(profile.devices))
    counts = [profile.devices.count(kind) for kind in kinds]
    one_each = replace_fields(profile, devices=tuple(kinds))
    orders = [profile.devices]
    for count in _counts(profile, request.num_microbatches):
        layout = Layout(one_each, count)
        found = partition_any_order(
            layout.seconds, counts, num_microbatches=count, allowed=layout.allowed
        )
        orders.append(tuple(kinds[kind] for kind in found.devices))
    return list(dict.fromkeys(orders))


class _Search:
    """One search: over counts, schedules and cuts."""

    def __init__(self, profile: Profile, request: Request) -> None:
        self.profile = profile
        self.request = request
        self.workers = len(profile.devices)
        self.cuts = request.positions(profile.labels, profile.forbidden, self.workers)
        self.recompute = request.recomputed(profile.labels, profile.forbidden)
        self.rejected: list[Candidate] = []
        self.short: tuple[CapacityError, tuple[int, ...]] | None = None

    def plans(self, most: int) -> list[Plan]:
        """The best plans, the best first.

        Raises:
            PlanError: none fits the memory.
        """
        names = self._names()
        counts = _counts(self.profile, self.request.num_microbatches)
        options = [
            option
            for layout in (Layout(self.profile, count) for count in counts)
            for name in names
            for stages in self._stage_counts(name)
            if (option := self._best(layout, name, stages)) is not None
        ]
        if not options and self.short is not None:
            raise nothing_fits(self.profile, self.request, *self.short) from self.short[0]
        ordered = _ordered(self._fitted(self._refined(options)))
        others = alternatives(self.profile, self.request.memory)
        plans = []
        for chosen in ordered[:most]:
            mine = [*others, *(o.candidate(chosen) for o in ordered), *self.rejected]
            plan = chosen.plan(others[0], others[1], sorted(mine, key=_time))
            plans.append(replace_fields(plan, boundary_dtype=self.request.boundary_dtype))
        return plans

    def _names(self) -> tuple[str, ...]:
        """The schedules whose stages are looked for; a fitted one takes those of others."""
        asked = self.request.schedule
        if asked == "auto":
            alone = self.workers == 1 and self.cuts is None
            return PREFERENCE[:1] if alone else tuple(n for n in PREFERENCE if n != "fitted")
        return ("eager-1f1b", "interleaved") if asked == "fitted" else (asked,)

    def _stage_counts(self, name: str) -> list[int]:
        """With how many stages a schedule is tried."""
        recipe, asked = SCHEDULES[name], self.request.stages_per_worker
        if self.cuts is not None:
            numbers = [len(self.cuts) + 1]
        elif asked != "auto":
            numbers = [asked * self.workers]
        else:
            several = recipe.stages_per_worker is not StagesPerWorker.ONE
            numbers = [(STAGES_PER_WORKER if several else 1) * self.workers]
        if self.request.schedule == name:
            for number in numbers:
                recipe.workers(number, self.workers)  # raises where that does not work out
            return numbers
        places = sum(k not in self.profile.forbidden for k in range(1, self.profile.num_calls))
        most = max(self.workers, places + 1)
        return [n for n in numbers if recipe.takes(n, self.workers) and n <= most]

    def _best(self, layout: Layout, name: str, stages: int) -> Option | None:
        """The fastest cuts for a schedule; `None` if none fits the memory."""
        cutter = self._cutter(layout, name, stages)
        try:
            return fastest(cutter, name)
        except CapacityError as error:
            if self.short is None or len(cutter.placement) < len(self.short[1]):
                self.short = error, cutter.placement
            elif len(cutter.placement) == len(self.short[1]):
                closer = error.shortfall.bytes < self.short[0].shortfall.bytes
                self.short = (error, cutter.placement) if closer else self.short
            self._reject(layout, name, stages, error)
            return None

    def _cutter(self, layout: Layout, name: str, stages: int) -> Cutter:
        return cutter_for(layout, name, stages, self.request.memory, self.recompute, self.cuts)

    def _reject(self, layout: Layout, name: str, stages: int, error: CapacityError) -> None:
        self.rejected.append(
            Candidate(
                schedule=name,
                num_microbatches=layout.count,
                stages=stages,
                predicted_step_seconds=None,
                why=f"does not fit the memory by {show_bytes(error.shortfall.bytes)}",
            )
        )

    def _refined(self, options: list[Option]) -> list[Option]:
        """The same options, the fastest of them improved."""
        fastest = sorted(options, key=lambda option: option.seconds)[:_REFINED]
        better = {id(option): self._moved(option) for option in fastest}
        return [better.get(id(option), option) for option in options]

    def _moved(self, option: Option) -> Option:
        """Move single cuts as long as the simulation gets faster.

        The partition's objectives count forward and backward together; how a schedule interleaves
        them, only the simulation knows.
        """
        if self.cuts is not None:
            return option
        cutter = self._cutter(option.layout, option.name, len(option.stretches))
        for _ in range(_MOST_MOVES):
            moves = [
                replace(option, stretches=tuple(stretches))
                for cuts in _neighbours(option)
                if (stretches := cutter.at(cuts)) is not None
            ]
            best = min(moves, key=lambda o: o.seconds, default=option)
            if best.seconds >= option.seconds:
                break
            option = best
        return option

    def _fitted(self, options: list[Option]) -> list[Option]:
        """The same options, and schedules made for the stages of the fastest."""
        if self.request.schedule not in ("auto", "fitted") or len(options) == 1:
            return options
        fastest = sorted(options, key=lambda option: option.seconds)[:_FITTED]
        made = [option.fitted(_BUDGET) for option in fastest]
        return made if self.request.schedule == "fitted" else [*options, *made]


def _time(candidate: Candidate) -> float:
    seconds = candidate.predicted_step_seconds
    return float("inf") if seconds is None else seconds


def _ordered(options: Sequence[Option]) -> list[Option]:
    """The fastest first; among those that are as fast, the one that is preferred.

    One for every schedule and count: a fit may have ended with a schedule that was there before.
    """
    best = min(option.seconds for option in options)
    equal = sorted((o for o in options if o.seconds <= best * _EQUAL), key=lambda o: o.rank)
    rest = sorted((o for o in options if o.seconds > best * _EQUAL), key=lambda o: o.seconds)
    first: dict[tuple[str, int], Option] = {}
    for option in [*equal, *rest]:
        first.setdefault((option.name, option.layout.count), option)
    return list(first.values())


def _neighbours(option: Option) -> Iterator[tuple[int, ...]]:
    """The cuts with one of them moved, to the places near it."""
    allowed = option.layout.allowed
    edges = [stretch.start for stretch in option.stretches] + [option.stretches[-1].stop]
    for s in range(1, len(edges) - 1):
        for places in (range(edges[s] + 1, edges[s + 1]), range(edges[s] - 1, edges[s - 1], -1)):
            for k in islice((k for k in places if allowed[k]), _REACH):
                yield (*edges[1:s], k, *edges[s + 1 : -1])


def _counts(profile: Profile, asked: int | Auto) -> list[int]:
    batch_size = profile.batch_size
    if asked == "auto":
        least = max(profile.on(device).rows[0] for device in profile.devices)
        counts = {-(-batch_size // rows) for rows in _measured_sizes(profile)}
        return sorted(count for count in counts if batch_size // count >= least) or [1]
    return [asked]


def _measured_sizes(profile: Profile) -> set[int]:
    """On every device. Kernels work in blocks: a size between two of them may cost far more."""
    sizes = [set(profile.on(device).rows) for device in profile.devices]
    return {rows for rows in set.intersection(*sizes) if rows <= profile.batch_size}
