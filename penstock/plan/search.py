"""Choosing the replicas, cuts, number of micro-batches, schedule, and what to recompute.

Plans with each number of replicas, and of one device alone, are looked for and compared.

For every number of micro-batches the partition is exact; which of its objectives suits a schedule
best is decided by simulating the schedule on the stages that it gives. The few fastest are then
refined: whether a cut a few calls away suits them better, and whether a schedule fitted to the
stages does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from penstock.plan.plan import WORTH_FEWER, Candidate, Plan
from penstock.plan.request import Auto, Cut, Limits, Recompute, Request
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
    replicas: int | Auto = "auto",
) -> Plan:
    """Find the fastest plan of all kinds for the profile's devices.

    Args:
        profile: measured costs.
        num_microbatches, schedule, cuts, recompute, memory_limit, optimizer_state,
            stages_per_worker, any_order, replicas: as in `penstock.plan.request.Request`.

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
        replicas=replicas,
    )
    return plans(profile, request)[0]


def plans(
    profile: Profile, request: Request, most: int = 1, limits: Limits | None = None
) -> list[Plan]:
    """The best few plans, the best one first; each has another kind, schedule or count.

    Args:
        profile: measured costs.
        request: what is asked for.
        most: how many plans.
        limits: what the workers allow where the kind of plan is to be chosen; anything by default.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    return plans_on_any([profile], request, most, limits)


def plans_on_any(
    profiles: Sequence[Profile], request: Request, most: int = 1, limits: Limits | None = None
) -> list[Plan]:
    """The best few plans on the devices of any of these profiles, of one program, as `plans`.

    Args:
        profiles: for other numbers of workers, with other numbers of intra-op threads; all use the
            same cores, so with several profiles each is planned for with all of its devices.
        request, most, limits: as of `plans`.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    request.check_count(profiles[0].batch_size)
    limits = limits or Limits()
    if len(profiles) == 1 and request.replicas == 1:
        return _of_one_replica(profiles[0], request, most)
    found: list[Plan] = []
    errors: list[PlanError] = []
    for profile in profiles:
        found += _of_all_kinds(profile, request, most, limits, errors)
    fewer: list[Plan] = []
    if len(profiles) == 1 and not limits.all_devices:
        fewer = _of_one_device(profiles[0], request, most)
    if not found and not fewer:
        raise errors[0]
    return _compared(sorted(found, key=_seconds), sorted(fewer, key=_seconds), most)


def _of_one_replica(profile: Profile, request: Request, most: int) -> list[Plan]:
    """The best few plans of stages on all devices.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    request = replace(request, replicas=1)
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
    return sorted(found, key=_seconds)[:most]


def _of_all_kinds(
    profile: Profile, request: Request, most: int, limits: Limits, errors: list[PlanError]
) -> list[Plan]:
    """The best few plans of each number of replicas on all devices; to `errors` comes what fails.

    Raises:
        InputError: as `plan` does.
    """
    number = len(profile.devices)
    is_free = request.replicas == "auto" and number > 1
    why = (limits.one_replica or profile.one_replica) if is_free else ""
    found: list[Plan] = []
    for replicas in request.replica_numbers(number, bool(why)):
        if is_free and replicas > profile.batch_size:
            break
        try:
            found += _replicated(profile, request, replicas, most)
        except PlanError as error:
            errors.append(error)
    return [replace_fields(plan, note=why) for plan in found]


def _of_one_device(profile: Profile, request: Request, most: int) -> list[Plan]:
    """The best few plans of one device alone of several, where that may be chosen."""
    if request.replicas != "auto" or request.asks_for_stages or len(profile.devices) == 1:
        return []
    found: list[Plan] = []
    for device in dict.fromkeys(profile.devices):
        with suppress(PlanError):  # it does not fit the memory
            found += _of_one_replica(replace_fields(profile, devices=(device,)), request, most)
    return found


def _compared(found: Sequence[Plan], fewer: Sequence[Plan], most: int) -> list[Plan]:
    """The best few of all plans, each with all that was considered.

    Args:
        found: plans on all devices, the fastest first.
        fewer: plans that leave out devices; preferred if they are clearly faster.
        most: how many plans.
    """
    ordered = [*found, *fewer]
    if fewer and (not found or _seconds(found[0]) >= WORTH_FEWER * _seconds(fewer[0])):
        ordered = [*fewer[:1], *sorted([*found, *fewer[1:]], key=_seconds)]
    best = ordered[0]
    every = [candidate for plan in ordered for candidate in plan.considered]
    ways = {candidate.way for candidate in every if not candidate.only_compared}
    every = [c for c in every if not (c.only_compared and c.way in ways)]
    considered = dict.fromkeys(_compared_with(candidate, best) for candidate in every)
    alone = [c for c in considered if c.way == "one device"]
    parallel = [c for c in considered if c.way == "data parallel" and c.stages == 1]
    return [
        replace_fields(
            plan,
            one_device_seconds=min(map(_time, alone)) if any(map(_fits, alone)) else None,
            data_parallel_seconds=min(map(_time, parallel)) if any(map(_fits, parallel)) else None,
            considered=tuple(sorted(considered, key=_time)),
        )
        for plan in ordered[:most]
    ]


def _compared_with(found: Candidate, best: Plan) -> Candidate:
    """A candidate that was compared with those of its own kind, among all."""
    seconds, chosen = found.predicted_step_seconds, best.predicted_step_seconds
    if seconds is None:
        return found
    own = (found.way, found.replicas, found.threads)
    is_best = found.why == "chosen" and own == (best.way, best.replicas, best.threads)
    if is_best or (found.why != "chosen" and seconds == chosen):
        return found
    if seconds > chosen:
        return replace_fields(found, why=f"{seconds / chosen - 1:.1%} slower")
    if found.way == "one device" and len(best.devices) > 1:
        return replace_fields(found, why=f"{1 - seconds / chosen:.1%} faster, which may be noise")
    if found.only_compared:
        how = "not possible" if best.note else "not asked for"
        return replace_fields(found, why=f"{1 - seconds / chosen:.1%} faster, and {how}")
    return replace_fields(found, why="as fast")


def _replicated(profile: Profile, request: Request, replicas: int, most: int) -> list[Plan]:
    """The best few plans of so many replicas: those of the first one's part of devices and rows.

    To its time comes that of adding up the last gradients of all the others.

    Raises:
        PlanError: there is none; or the devices cannot be divided into equal parts.
        InputError: as `plan` does.
    """
    if replicas == 1:
        return _of_one_replica(profile, request, most)
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
    recompute = request.recompute
    if request.replicas == "auto" and profile.no_recomputing:
        if recompute not in ("auto", "none"):
            raise PlanError(f"replicas cannot recompute: {profile.no_recomputing}")
        recompute = "none"
    share: int | Auto = "auto" if count == "auto" else min(rows, -(-count // replicas))
    own = replace_fields(profile, devices=parts[0], batch_size=rows)
    adding = (replicas - 1) * sum(profile.weights) / each / ADDED_PER_SECOND
    others = alternatives(profile, request.memory)
    found = []
    asked = replace(request, replicas=1, num_microbatches=share, recompute=recompute)
    largest = profile.batch_size if count == "auto" else min(count, profile.batch_size)
    for plan in _Search(own, asked, halves=False).plans(most):
        own_plans = [c for c in plan.considered if not c.only_compared]
        mine = [_of_replicas(c, replicas, largest, adding) for c in own_plans]
        found.append(
            replace_fields(
                plan,
                batch_size=profile.batch_size,
                num_microbatches=min(plan.num_microbatches * replicas, largest),
                predicted_step_seconds=plan.predicted_step_seconds + adding,
                one_device_seconds=others[0].predicted_step_seconds,
                data_parallel_seconds=others[1].predicted_step_seconds,
                other_replicas=tuple(tuple(part) for part in parts[1:]),
                considered=tuple(sorted([*others, *mine], key=_time)),
            )
        )
    return found


def _of_replicas(found: Candidate, replicas: int, most: int, adding: float) -> Candidate:
    """A replica's pipeline as so many of them, which share `most` micro-batches at the most."""
    seconds = found.predicted_step_seconds
    return replace_fields(
        found,
        way="pipeline" if found.stages > 1 else "data parallel",
        replicas=replicas,
        num_microbatches=min(found.num_microbatches * replicas, most),
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
            compared = [_against(other, chosen) for other in others] if self.workers > 1 else []
            mine = [*compared, *(o.candidate(chosen) for o in ordered), *self.rejected]
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
                threads=self.profile.threads,
                way="pipeline" if stages > 1 else "one device",
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


def _against(found: Candidate, chosen: Option) -> Candidate:
    """What was not asked for, as it compares with the plan that was chosen."""
    seconds = found.predicted_step_seconds
    if seconds is None:
        return found
    excess = seconds / chosen.seconds - 1
    faster = f"{-excess:.1%} faster, and not asked for"
    return replace_fields(found, why=f"{excess:.1%} slower" if excess > 0 else faster)


def _time(candidate: Candidate) -> float:
    seconds = candidate.predicted_step_seconds
    return float("inf") if seconds is None else seconds


def _fits(candidate: Candidate) -> bool:
    return candidate.predicted_step_seconds is not None


def _seconds(plan: Plan) -> float:
    return plan.predicted_step_seconds


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
