"""Plans of one replica: the number of micro-batches, the cuts, the schedule, what to recompute.

For every number of micro-batches the partition is exact; which of its objectives suits a schedule
best is decided by simulating the schedule on the stages that it gives. The few fastest are then
refined: whether a cut a few calls away suits them better, and whether a schedule fitted to the
stages does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as replace_fields

from penstock.errors import PlanError
from penstock.plan.candidates import (
    EQUAL,
    PREFERENCE,
    UNLIKELY,
    Option,
    cutter_for,
    fastest,
    usual_stages,
)
from penstock.plan.cutting import Cutter
from penstock.plan.decisions import Candidate
from penstock.plan.layout import Layout, Memory
from penstock.plan.partition import CapacityError, partition
from penstock.plan.plan import Plan
from penstock.plan.request import Auto, Request
from penstock.plan.shortage import NothingFitsError
from penstock.profile.data import Profile
from penstock.schedule import SCHEDULES
from penstock.units import show_bytes

EFFORT = 1_500_000.0
"""How many actions are simulated in a search: a second or two."""

_WORTH_PARTS = 1.05  # how many times as fast more micro-batches have to be on a single device
_REFINED = 3  # of the fastest options
_FITTED = 2  # of the fastest options
_BUDGET = 40  # rules that are tried for each
_MOST_MOVES = 20
_FEW = 3  # devices, of which all orders are tried
_REACH = 4  # places on each side of a cut
_LARGE = 1500  # calls given to stages; with fewer, what cannot be the fastest is listed, too
_NEARLY = 0.95  # of a bound that takes devices to be faster by one factor for all calls
_CUTTING = 24  # what finding the cuts of a schedule costs, in actions for each of its forwards


def plans_of_stages(
    profile: Profile,
    request: Request,
    most: int,
    others: Sequence[Candidate] = (),
    effort: float = EFFORT,
    beat: float = math.inf,
    memory: Memory | None = None,
) -> list[Plan]:
    """The best few plans of stages on all devices.

    Args:
        profile, request: as of `penstock.plan.search.plans`.
        most: how many plans.
        others: what they are compared with, see `alternatives`.
        effort: about how many actions may be simulated.
        beat, memory: as of `StageSearch`.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    request = replace(request, replicas=1)
    if not request.any_order:
        search = StageSearch(profile, request, memory, effort=effort, beat=beat)
        return search.plans(most, others)
    found: list[Plan] = []
    errors: list[PlanError] = []
    orders = orders_of(profile, request)
    for order in orders:
        try:
            ordered = replace_fields(profile, devices=order)
            each = effort / len(orders)
            search = StageSearch(ordered, request, memory, effort=each, beat=beat)
            found += search.plans(most, others)
        except PlanError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return sorted(found, key=lambda plan: plan.predicted_step_seconds)[:most]


def orders_of(profile: Profile, request: Request) -> list[tuple[str, ...]]:
    """Orders of the devices that are tried, the given one first.

    These are all orders of a few devices. Of more devices, they are those that the exact partition
    over orders finds best for some number of micro-batches, without regard to memory.
    """
    if len(profile.devices) <= _FEW:
        every = dict.fromkeys(permutations(profile.devices))
        return list(dict.fromkeys([profile.devices, *every]))
    kinds = list(dict.fromkeys(profile.devices))
    counts = [profile.devices.count(kind) for kind in kinds]
    one_each = replace_fields(profile, devices=tuple(kinds))
    orders = [profile.devices]
    for count in microbatch_counts(profile, request.num_microbatches):
        layout = Layout(one_each, count)
        with suppress(PlanError):  # there are too few places to cut, or too many orders
            found = partition(
                layout.seconds, counts=counts, num_microbatches=count, allowed=layout.allowed
            )
            orders.append(tuple(kinds[kind] for kind in found.devices))
    return list(dict.fromkeys(orders))


class _Case(NamedTuple):
    """What cuts are looked for.

    Attributes:
        layout: the costs for a number of micro-batches.
        name: of the schedule.
        stages: how many.
    """

    layout: Layout
    name: str
    stages: int

    @property
    def effort(self) -> float:
        """What it takes to find them, in simulated actions."""
        return self.layout.count * self.stages * _CUTTING

    @property
    def work(self) -> int:
        """What it takes to find them, in calls that are given to stages."""
        return self.stages * self.layout.profile.num_calls

    @property
    def least_seconds(self) -> float:
        """About the least seconds that a step can take, with any cuts.

        The work is divided as if calls could be split at will, and some worker runs the longest
        calls between two places to cut. If every worker has one stage with whole backwards, stages
        also wait for those before them (see `step_bound`).
        """
        layout, count = self.layout, self.layout.count
        workers = len(layout.profile.devices)
        speeds = 1 / layout.pieces.sum(axis=1)
        divided = count * float(1 / np.sum(speeds))
        longest = count * float(layout.pieces.min(axis=0).max())
        least = _NEARLY * max(divided, longest)
        if count >= workers:
            least = max(least, self.likely_seconds / UNLIKELY)
        if self.stages != workers or SCHEDULES[self.name].splits_backward:
            return least
        done, fill = 0.0, min(1.0, layout.least_fill)  # of the program, in a second of the step
        for speed in reversed(speeds.tolist()):
            done = max(done, speed / count + done * (1 - fill / count))
        return max(least, _NEARLY / done)

    @property
    def likely_seconds(self) -> float:
        """About what a step takes, if the calls could be divided at will."""
        count, workers = self.layout.count, len(self.layout.profile.devices)
        whole = float(1 / np.sum(1 / self.layout.seconds.sum(axis=1)))  # a micro-batch on all
        idle = {"naive": count * (workers - 1.0), "zero-bubble": (workers - 1) / 3}
        looped = (workers - 1) * workers / self.stages
        return (count + idle.get(self.name, looped)) * whole


class StageSearch:
    """One search: over counts, schedules and cuts.

    Args:
        profile: what was measured.
        request: what is asked for.
        memory: what training holds; by default as requested.
        halves: whether backwards may be halved.
        effort: about how many actions may be simulated.
        beat: the seconds of a step that was found already; if the program or the pipeline is large,
            what is not likely to be faster is left out.
        rows: what tells the rows of each of so many micro-batches; by default the batch is split.
    """

    def __init__(
        self,
        profile: Profile,
        request: Request,
        memory: Memory | None = None,
        halves: bool = True,
        effort: float = EFFORT,
        beat: float = math.inf,
        rows: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.profile = profile
        self.beat = beat
        self.rows = rows
        self.halves = halves
        self.request = request
        self.memory = memory or request.memory
        self.workers = len(profile.devices)
        self.cuts = request.positions(profile.labels, profile.forbidden, self.workers)
        self.recompute = request.recomputed(profile.labels, profile.forbidden)
        self.effort = effort
        self.short: list[tuple[_Case, CapacityError, tuple[int, ...]]] = []

    def plans(self, most: int, others: Sequence[Candidate] = ()) -> list[Plan]:
        """The best plans, the best first.

        Args:
            most: how many plans.
            others: what they are compared with: one device, data parallelism, and more.

        Raises:
            PlanError: none fits the memory.
        """
        ordered = self.ordered(most)
        plans = []
        for chosen in ordered[:most]:
            compared = [_against(other, chosen) for other in others] if self.workers > 1 else []
            mine = [*compared, *(o.candidate(chosen) for o in ordered), *self.rejected]
            plan = replace_fields(
                chosen.plan(),
                one_device_seconds=others[0].predicted_step_seconds if others else None,
                data_parallel_seconds=others[1].predicted_step_seconds if others else None,
                boundary_dtype=self.request.boundary_dtype,
                considered=tuple(sorted(mine, key=lambda candidate: candidate.seconds)),
            )
            plans.append(plan)
        return plans

    def ordered(self, most: int) -> list[Option]:
        """The best option for every schedule and count, the best first.

        Args:
            most: how many of them matter.

        Raises:
            PlanError: none fits the memory.
        """
        options = self._options(most)
        if not options:
            if not self.short:
                raise self._too_many_stages()
            shorts = [(error, placement) for _, error, placement in self.short]
            raise NothingFitsError(self.profile, self.request, self.memory, shorts)
        return _ordered(self._fitted(self._refined(options)))

    def _options(self, most: int) -> list[Option]:
        """The fastest cuts for every count and schedule that fit the memory.

        With many workers only the likeliest counts and schedules, so that it takes seconds.

        Args:
            most: how many of them matter.
        """
        counts = microbatch_counts(self.profile, self.request.num_microbatches)
        layouts = [Layout(self.profile, n, self.rows(n) if self.rows else None) for n in counts]
        cases = [
            _Case(layout, name, stages)
            for layout in layouts
            for name in self._names()
            for stages in self._stage_counts(name)
        ]
        options: list[Option] = []
        left: list[_Case] = []
        for case in sorted(cases, key=lambda case: case.likely_seconds):
            beat = self._to_beat(case, options, most)
            if options and case.least_seconds > beat:
                continue
            if not self._may_spend(case.effort):
                left.append(case)
            elif (option := self._best(case, beat)) is not None:
                options.append(option)
        for case in sorted(left, key=lambda case: case.effort):
            if options:
                break
            if (option := self._best(case)) is not None:
                options.append(option)
        return options

    def _to_beat(self, case: _Case, options: Sequence[Option], most: int) -> float:
        """The seconds that a case has to come close to; anything if it is small."""
        if case.work < _LARGE:
            return math.inf
        return min(self.beat, nth_smallest([option.seconds for option in options], most))

    def _may_spend(self, effort: float) -> bool:
        """Whether this much effort is left, in simulated actions; if so, it is used up."""
        may = effort <= self.effort
        self.effort -= effort if may else 0.0
        return may

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
            numbers = [usual_stages(name, self.workers)]
        if self.request.schedule == name:
            for number in numbers:
                recipe.workers(number, self.workers)  # raises where that does not work out
            return numbers
        places = sum(k not in self.profile.forbidden for k in range(1, self.profile.num_calls))
        most = max(self.workers, places + 1)
        return [n for n in numbers if recipe.takes(n, self.workers) and n <= most]

    def _too_many_stages(self) -> PlanError:
        """The error if the program has no places for as many stages as are asked for."""
        places = sum(k not in self.profile.forbidden for k in range(1, self.profile.num_calls))
        return PlanError(
            f"stages_per_worker={self.request.stages_per_worker} with {self.workers} workers makes "
            f"more stages than the {1 + places} that the program has places for; ask for fewer, or "
            "use fewer devices"
        )

    def _best(self, case: _Case, beat: float = math.inf) -> Option | None:
        """The fastest cuts for a schedule; `None` if none fits the memory."""
        cutter = self._cutter(*case)
        try:
            return fastest(cutter, case.name, beat)
        except CapacityError as error:
            self.short.append((case, error, cutter.placement))
            return None

    def _cutter(self, layout: Layout, name: str, stages: int) -> Cutter:
        return cutter_for(layout, name, stages, self.memory, self.recompute, self.cuts)

    @property
    def rejected(self) -> list[Candidate]:
        """What does not fit the memory, and by how much."""
        return [
            Candidate(
                schedule=case.name,
                num_microbatches=case.layout.count,
                stages=case.stages,
                predicted_step_seconds=None,
                threads=self.profile.threads,
                way="pipeline" if case.stages > 1 else "one device",
                why=f"does not fit the memory by {show_bytes(error.shortfall.bytes)}",
            )
            for case, error, _ in self.short
        ]

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
        actions = 2 * option.layout.count * len(option.stretches)
        cutter = self._cutter(option.layout, option.name, len(option.stretches))
        for _ in range(_MOST_MOVES):
            near = list(_neighbours(option))
            if not self._may_spend(actions * len(near)):
                break
            best = option
            for cuts in near:
                stretches = cutter.at(cuts)
                if stretches is None or option.layout.busiest(stretches) >= best.seconds:
                    continue
                moved = replace(option, stretches=tuple(stretches))
                best = min(best, moved, key=lambda o: o.seconds)
            if best is option:
                break
            option = best
        return option

    def _fitted(self, options: list[Option]) -> list[Option]:
        """The same options, and schedules made for the stages of the fastest."""
        is_asked = self.halves and self.request.schedule in ("auto", "fitted")
        if not is_asked or len(options) == 1:
            return options
        fastest = sorted(options, key=lambda option: option.seconds)[:_FITTED]
        made: list[Option] = []
        for option in fastest:
            actions = 2 * option.layout.count * len(option.stretches)
            may = self._may_spend(actions * _BUDGET)
            if may or (self.request.schedule == "fitted" and not made):
                made.append(option.fitted(_BUDGET))
        return made if self.request.schedule == "fitted" else [*options, *made]


def nth_smallest(seconds: Sequence[float], number: int) -> float:
    """The `number`-th smallest of these seconds, from 1; infinite if there are fewer."""
    return sorted(seconds)[number - 1] if len(seconds) >= number else math.inf


def _against(found: Candidate, chosen: Option) -> Candidate:
    """What was not asked for, as it compares with the plan that was chosen."""
    seconds = found.predicted_step_seconds
    if seconds is None:
        return found
    excess = seconds / chosen.seconds - 1
    faster = f"{-excess:.1%} faster, and not asked for"
    return replace_fields(found, why=f"{excess:.1%} slower" if excess > 0 else faster)


def _ordered(options: Sequence[Option]) -> list[Option]:
    """The fastest first; among those that are as fast, the one that is preferred.

    A single device does the same work with any number of micro-batches, so that small differences
    are noise of the profile, and fewer are preferred. There is one for every schedule and count: a
    fit may have ended with a schedule that was there before.
    """
    best = min(option.seconds for option in options)
    if all(len(option.layout.profile.devices) == 1 for option in options):
        near = [option for option in options if option.seconds <= best * _WORTH_PARTS]
        fewest = min(option.layout.count for option in near)
        best = min(option.seconds for option in near if option.layout.count == fewest)
        equal = [o for o in near if o.layout.count == fewest and o.seconds <= best * EQUAL]
    else:
        equal = [option for option in options if option.seconds <= best * EQUAL]
    equal.sort(key=lambda option: option.rank)
    rest = sorted(options, key=lambda option: option.seconds)
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


def microbatch_counts(profile: Profile, wanted: int | Auto) -> list[int]:
    """The numbers of micro-batches that are considered: as wanted, or those of measured sizes."""
    batch_size = profile.batch_size
    if wanted == "auto":
        least = max(profile.on(device).rows[0] for device in profile.devices)
        counts = {-(-batch_size // rows) for rows in _measured_sizes(profile)}
        return sorted(count for count in counts if batch_size // count >= least) or [1]
    return [wanted]


def _measured_sizes(profile: Profile) -> set[int]:
    """The micro-batch sizes that were measured on every device, up to the batch size.

    Others are not considered, as kernels work in blocks: a size between two measured ones may cost
    far more.
    """
    sizes = [set(profile.on(device).rows) for device in profile.devices]
    return {rows for rows in set.intersection(*sizes) if rows <= profile.batch_size}
