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
from penstock.plan.alternatives import ADDED_PER_SECOND, alternatives
from penstock.plan.candidates import (
    PREFERENCE,
    STAGES_PER_WORKER,
    Option,
    cutter_for,
    fastest,
)
from penstock.plan.cutting import Cutter
from penstock.plan.layout import Layout
from penstock.plan.partition import CapacityError, partition
from penstock.plan.plan import Candidate, Plan
from penstock.plan.request import Auto, Cut, Recompute, Request
from penstock.plan.shortage import nothing_fits
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
    """Find the fastest plan for the profile's devices.

    Args:
        profile: measured costs.
        num_microbatches, schedule, cuts, recompute, memory_limit, optimizer_state,
            stages_per_worker, any_order: as in `penstock.plan.request.Request`.

    Returns:
        the plan, with its predicted step time and the bound.

    Raises:
        PlanError: there are too few calls or places to cut for the devices; a cut is not possible;
            or nothing fits the memory (the message says what would).
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
    if request.replicas != 1:
        return _with_replicas(profile, request, most)
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


def _with_replicas(profile: Profile, request: Request, most: int) -> list[Plan]:
    """The best few plans of as many replicas as are asked for, or of any number.

    Raises:
        PlanError: there is none, as `plan` says; or the devices cannot be shared so.
    """
    number, asked = len(profile.devices), request.replicas
    if asked == "auto":
        most_replicas = min(number, profile.batch_size)
        numbers = [n for n in range(1, most_replicas + 1) if number % n == 0]
    else:
        numbers = [asked]
    found: list[Plan] = []
    errors: list[PlanError] = []
    for replicas in numbers:
        try:
            found += _replicated(profile, replace(request, replicas=1), replicas, most)
        except PlanError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    best = sorted(found, key=lambda plan: plan.predicted_step_seconds)[:most]
    every = [candidate for plan in found for candidate in plan.considered]
    compared = dict.fromkeys(_compared_with(candidate, best[0]) for candidate in every)
    considered = tuple(sorted(compared, key=_time))
    return [replace_fields(plan, considered=considered) for plan in best]


def _compared_with(found: Candidate, best: Plan) -> Candidate:
    """A candidate that was compared with those of its own number of replicas, among all."""
    seconds, chosen = found.predicted_step_seconds, best.predicted_step_seconds
    if found.way != "pipeline" or seconds is None:
        return found
    if seconds > chosen:
        return replace_fields(found, why=f"{seconds / chosen - 1:.1%} slower")
    is_other = found.why == "chosen" and found.replicas != best.replicas
    return replace_fields(found, why="as fast") if is_other else found


def _replicated(profile: Profile, request: Request, replicas: int, most: int) -> list[Plan]:
    """The best few plans of so many replicas: those of the first one's part of devices and rows.

    To its time comes that of adding up the last gradients of all the others.

    Raises:
        PlanError: there is none; or the devices cannot be divided into equal parts.
    """
    if replicas == 1:
        return plans(profile, request, most)
    number = len(profile.devices)
    each = number // replicas
    parts = [profile.devices[k : k + each] for k in range(0, number, each or 1)]
    if number % replicas or any(part != parts[0] for part in parts):
        raise PlanError(
            f"{replicas} replicas need as many equal parts of the devices, and there are "
            f"{', '.join(profile.devices)}"
        )
    count, rows = request.num_microbatches, -(-profile.batch_size // replicas)
    if count != "auto" and count < replicas:
        raise PlanError(f"{replicas} replicas cannot share {count} micro-batches; give more")
    halves = request.schedule == "fitted" or (
        request.schedule != "auto" and SCHEDULES[request.schedule].splits_backward
    )
    if halves:
        raise PlanError(
            f"{request.schedule} may halve backwards, which replicas do not; choose another one"
        )
    share: int | Auto = "auto" if count == "auto" else min(rows, -(-count // replicas))
    own = replace_fields(profile, devices=parts[0], batch_size=rows)
    adding = (replicas - 1) * sum(profile.weights) / each / ADDED_PER_SECOND
    others = alternatives(profile, request.memory)
    found = []
    search = _Search(own, replace(request, num_microbatches=share), halves=False)
    for plan in search.plans(most):
        total = plan.num_microbatches * replicas if count == "auto" else count
        mine = [_of_replicas(c, replicas, adding) for c in plan.considered if c.way == "pipeline"]
        found.append(
            replace_fields(
                plan,
                batch_size=profile.batch_size,
                num_microbatches=min(total, profile.batch_size),
                predicted_step_seconds=plan.predicted_step_seconds + adding,
                one_device_seconds=others[0].predicted_step_seconds,
                data_parallel_seconds=others[1].predicted_step_seconds,
                other_replicas=tuple(tuple(part) for part in parts[1:]),
                considered=tuple(sorted([*others, *mine], key=_time)),
            )
        )
    return found


def _of_replicas(found: Candidate, replicas: int, adding: float) -> Candidate:
    """A replica's pipeline as so many of them."""
    seconds = found.predicted_step_seconds
    return replace_fields(
        found,
        replicas=replicas,
        predicted_step_seconds=None if seconds is None else seconds + adding,
    )


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
        found = partition(
            layout.seconds, counts=counts, num_microbatches=count, allowed=layout.allowed
        )
        orders.append(tuple(kinds[kind] for kind in found.devices))
    return list(dict.fromkeys(orders))


class _Search:
    """One search: over counts, schedules and cuts."""

    def __init__(self, profile: Profile, request: Request, halves: bool = True) -> None:
        self.profile = profile
        self.halves = halves  # whether backwards may be halved
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
        wanted = self.request.schedule
        if wanted == "auto":
            alone = self.workers == 1 and self.cuts is None
            names = [n for n in PREFERENCE if self.halves or not SCHEDULES[n].splits_backward]
            return tuple(names[:1] if alone else (n for n in names if n != "fitted"))
        return ("eager-1f1b", "interleaved") if wanted == "fitted" else (wanted,)

    def _stage_counts(self, name: str) -> list[int]:
        """With how many stages a schedule is tried."""
        recipe, wanted = SCHEDULES[name], self.request.stages_per_worker
        if self.cuts is not None:
            numbers = [len(self.cuts) + 1]
        elif wanted != "auto":
            numbers = [wanted * self.workers]
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
        is_asked = self.halves and self.request.schedule in ("auto", "fitted")
        if not is_asked or len(options) == 1:
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


def _counts(profile: Profile, wanted: int | Auto) -> list[int]:
    batch_size = profile.batch_size
    if wanted == "auto":
        least = max(profile.on(device).rows[0] for device in profile.devices)
        counts = {-(-batch_size // rows) for rows in _measured_sizes(profile)}
        return sorted(count for count in counts if batch_size // count >= least) or [1]
    return [wanted]


def _measured_sizes(profile: Profile) -> set[int]:
    """On every device. Kernels work in blocks: a size between two of them may cost far more."""
    sizes = [set(profile.on(device).rows) for device in profile.devices]
    return {rows for rows in set.intersection(*sizes) if rows <= profile.batch_size}
