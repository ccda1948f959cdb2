"""Plans for inference: a steady flow of forwards, without backwards.

`pipe.map`, and `pipe.generate` with several groups, have as many micro-batches under way as keep
all stages busy. In such a flow every worker and every link works all the time on one micro-batch
after the other, so that a batch takes as long as the busiest of them does for it: the order of
actions does not matter, and neither does the time of filling and draining. So stages are found by
their number alone, one for each worker, whatever the number of micro-batches is:

1. the least time of the busiest, over all cuts: by bisection, as it is quickly known whether there
   are cuts for a given time (`_Search.within`). If they do not fit the memory, by a sweep over the
   places for cuts, stage by stage, which knows what each stage would hold;
2. for the best plans: of all cuts whose busiest takes no longer, those with the lowest latency of
   one batch, which is what a single request waits for (another sweep).

All of it is exact. A worker is busy with the forwards of its stage, with what an action takes
besides, and with sending, unless that goes on by itself; then the link is busy with it. The thread
of the script is busy as well: it splits each batch, hands it out and puts its result together.

Memory is weights, the states of all groups under way (`Request.in_flight`, by default one more than
keep all stages busy; see `docs/generation.md`), what is live within the stage at its worst call,
and what waits to enter it. There are no gradients, no optimizer, and nothing is saved for a
backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

import numpy as np
from msgspec.structs import replace as replace_fields
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.plan.decisions import (
    WORTH_FEWER,
    Candidate,
    StagePlan,
    Way,
    batches_under_way,
)
from penstock.plan.layout import Floats, Layout
from penstock.plan.plan import Plan
from penstock.plan.problem import check_feasible
from penstock.plan.replicated import Devices, divisions
from penstock.plan.request import Limits, Request
from penstock.plan.shares import Sums, rows_of_replicas
from penstock.plan.stages import microbatch_counts, orders_of
from penstock.profile.data import Link, Profile
from penstock.units import show_bytes

SCHEDULE = "gpipe"
"""The schedule that plans for inference name: forwards of all micro-batches, one after another."""

_EQUAL = 1.002  # predictions closer than this say nothing
_ROUNDING = 1 + 1e-9  # of sums
_PRECISION = 1e-12  # of the least time of the busiest

Places = NDArray[np.intp]
Join = Callable[[Floats, Floats], Floats]


def plans_of_flow(
    profiles: Sequence[Profile], request: Request, most: int, limits: Limits
) -> list[Plan]:
    """The best few plans for a steady flow of forwards; each has another kind or count.

    Args:
        profiles, request, most, limits: as of `penstock.plan.search.plans_on_any`.

    Raises:
        PlanError: none fits the memory, or there are too few places to cut.
    """
    found: list[Flow] = []
    fewer: list[Flow] = []
    errors: list[PlanError] = []
    for profile in profiles:
        found += _flows(_on_all(profile, request, limits), request, errors)
        if len(profile.devices) > 1 and not limits.all_devices and _is_free(request):
            fewer += _flows(_alone(profile, request), request, errors)
    if not found and not fewer:
        short = [error for error in errors if isinstance(error, ShortError)]
        raise min(short, key=lambda error: error.missing, default=errors[0])
    ordered = _ordered(found, fewer)
    considered = _considered(ordered, profiles, request)
    alone = [c.seconds for c in considered if c.way == "one device"]
    parallel = [c.seconds for c in considered if c.way == "data parallel"]
    return [
        replace_fields(
            flow.plan(),
            one_device_seconds=_known(min(alone, default=math.inf)),
            data_parallel_seconds=_known(min(parallel, default=math.inf)),
            considered=tuple(considered),
        )
        for flow in ordered[:most]
    ]


class ShortError(PlanError):
    """Nothing fits the memory.

    Args:
        text: by how much, and what would fit.
        missing: bytes that a worker has too little, at best.
    """

    def __init__(self, text: str, missing: float) -> None:
        super().__init__(text)
        self.missing = missing


def _is_free(request: Request) -> bool:
    """Whether the kind of plan may be chosen, so that devices may be left out."""
    return request.replicas == "auto" and not request.asks_for_stages


def _known(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


# -- what is tried --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """What stages are looked for.

    Attributes:
        layout: the costs for a number of micro-batches.
        parts: the places of the devices of every replica in the profile's list.
        sums: how replicas would add up gradients: it says where their weights are, and how
            micro-batches are shared.
        note: why there is one replica, if several were not possible.
    """

    layout: Layout
    parts: tuple[tuple[int, ...], ...]
    sums: Sums = "chained"
    note: str = ""


def _on_all(profile: Profile, request: Request, limits: Limits) -> Iterator[_Case | PlanError]:
    """Every number of replicas and of micro-batches on all devices."""
    number = len(profile.devices)
    is_free = request.replicas == "auto" and number > 1
    note = (limits.one_replica or profile.one_replica) if is_free else ""
    sums = limits.sums(profile.devices)
    counts = microbatch_counts(profile, request.num_microbatches)
    orders = orders_of(profile, request) if request.any_order else [profile.devices]
    ordered = [replace_fields(profile, devices=order) for order in orders]
    layouts = [{count: Layout(own, count) for count in counts} for own in ordered]
    for replicas in request.replica_numbers(number, bool(note)):
        able = [count for count in counts if count >= replicas]
        if not able:
            if not is_free:
                rows = profile.batch_size
                few = f"{replicas} replicas cannot share"
                yield PlanError(
                    f"{few} {rows} rows; give more"
                    if rows < replicas
                    else f"{few} {max(counts)} micro-batches: use num_microbatches={replicas} or "
                    "more, or fewer replicas"
                )
            continue
        for own, by_count in zip(ordered, layouts, strict=True):
            try:
                every = [_places(own, parts) for parts in divisions(own, replicas)]
            except PlanError as error:
                yield error
                continue
            for parts, count in product(every, able):
                yield _Case(by_count[count], parts, sums, note)


def _alone(profile: Profile, request: Request) -> Iterator[_Case]:
    """One device alone of several, at every number of micro-batches."""
    for device in dict.fromkeys(profile.devices):
        own = profile.alone(device)
        for count in microbatch_counts(own, request.num_microbatches):
            yield _Case(Layout(own, count), ((0,),))


def _places(profile: Profile, parts: Sequence[Devices]) -> tuple[tuple[int, ...], ...]:
    """The devices of every replica as places in the profile's list, each used once."""
    left: dict[str, list[int]] = {}
    for place, device in enumerate(profile.devices):
        left.setdefault(device, []).append(place)
    return tuple(tuple(left[device].pop(0) for device in part) for part in parts)


def _flows(
    cases: Iterable[_Case | PlanError],
    request: Request,
    errors: list[PlanError],
) -> list[Flow]:
    """The best stages of every case that has some; the errors of the others are added to `errors`.

    A case whose best stages do not fit the memory is left out if even these, without any limit, are
    slower than the best that was found.
    """
    searches: list[_Search] = []
    for case in cases:
        try:
            if isinstance(case, PlanError):
                raise case
            searches.append(_Search(case, request))
        except PlanError as error:
            errors.append(error)
    found: list[Flow] = []
    for search in sorted(searches, key=lambda search: search.free.seconds):
        best = min((flow.seconds for flow in found), default=math.inf)
        if not search.fits(search.free) and search.free.seconds > best * _EQUAL:
            continue
        try:
            found.append(search.flow())
        except PlanError as error:
            errors.append(error)
    return found


def _ordered(found: Sequence[Flow], fewer: Sequence[Flow]) -> list[Flow]:
    """The best first: the fastest, and of those that are as fast the one with the lowest latency.

    Args:
        found: on all devices.
        fewer: that leave out devices, which have to be clearly faster.
    """

    def ranked(flows: Sequence[Flow]) -> list[Flow]:
        best = min((flow.seconds for flow in flows), default=0.0)
        equal = [flow.with_lowest_latency() for flow in flows if flow.seconds <= best * _EQUAL]
        rest = [flow for flow in flows if flow.seconds > best * _EQUAL]
        return [
            *sorted(equal, key=lambda flow: (flow.way_seconds, flow.seconds)),
            *sorted(rest, key=lambda flow: flow.seconds),
        ]

    if not found or not fewer:
        return ranked(found or fewer)
    all_devices, alone = ranked(found), ranked(fewer)
    first, others = all_devices[0], [*all_devices[1:], *alone]
    if first.seconds >= WORTH_FEWER * alone[0].seconds:
        first, others = alone[0], [*all_devices, *alone[1:]]
    return [first, *sorted(others, key=lambda flow: flow.seconds)]


def _considered(
    ordered: Sequence[Flow], profiles: Sequence[Profile], request: Request
) -> list[Candidate]:
    """What was tried, and one device and replicas of the whole model, asked for or not."""
    best = ordered[0]
    found = [flow.candidate(best) for flow in ordered]
    ways = {candidate.way for candidate in found}
    free = Request(
        num_microbatches=request.num_microbatches,
        memory_limit=request.memory_limit,
        inference=True,
        in_flight=request.in_flight,
    )
    for profile in profiles:
        if len(profile.devices) == 1:
            continue
        parts = tuple((place,) for place in range(len(profile.devices)))
        counts = microbatch_counts(profile, free.num_microbatches)
        cases: dict[Way, Iterable[_Case]] = {
            "one device": _alone(profile, free),
            "data parallel": [_Case(Layout(profile, c), parts) for c in counts if c >= len(parts)],
        }
        for way in cases.keys() - ways:
            if others := _flows(cases[way], free, []):
                compared = min(others, key=lambda flow: flow.seconds).candidate(best)
                found.append(replace_fields(compared, only_compared=True))
    return sorted(dict.fromkeys(found), key=lambda candidate: candidate.seconds)


# -- the stages of one case -----------------------------------------------------------------------


class _Search:
    """Finds the stages of a case.

    Args:
        case: what is looked for.
        request: what is asked for.

    Raises:
        PlanError: there are too few places to cut.
    """

    def __init__(self, case: _Case, request: Request) -> None:
        layout, profile = case.layout, case.layout.profile
        self.case, self.layout, self.profile = case, layout, profile
        self.request = request
        self.stages = len(case.parts[0])
        self.replicas = len(case.parts)
        even = (1,) * self.replicas
        self.share = rows_of_replicas(layout.rows, even, case.sums)[0]  # no other one has more
        cuts = request.positions(profile.labels, profile.forbidden, self.stages)
        allowed = layout.allowed.copy()
        if cuts is not None:
            allowed = np.isin(np.arange(len(allowed)), cuts)
        self.is_free = cuts is None
        allowed[[0, -1]] = False
        inner = np.flatnonzero(allowed)
        check_feasible(self.stages, profile.num_calls, len(inner))
        self.places = np.array([0, *inner, profile.num_calls])

    # -- time ---------------------------------------------------------------------------------

    def _work_until(self, place: int) -> Floats:
        """(places,): seconds of all forwards of a replica's share before each place for a cut."""
        forward = sum(self.layout.forward_of(rows)[place] for rows in self.share)
        found: Floats = _until(np.asarray(forward))[self.places]
        return found

    @cached_property
    def _works(self) -> list[list[Floats]]:
        """For every stage the work on each different device that it has in some replica."""
        profile = self.profile
        found = []
        for homes in zip(*self.case.parts, strict=True):
            different = {profile.devices[home]: home for home in homes}
            found.append([self._work_until(home) for home in different.values()])
        return found

    def _link(self, stage: int) -> Link:
        """The slowest link of all replicas between a stage and the next; nothing after the last."""
        if stage + 1 == self.stages:
            return Link()
        names = self.profile.devices
        pairs = {(names[part[stage]], names[part[stage + 1]]) for part in self.case.parts}
        links = [self.profile.link(a, b) for a, b in pairs]
        speeds = [link.bytes_per_second for link in links if link.bytes_per_second]
        return Link(
            latency_seconds=max(link.latency_seconds for link in links),
            bytes_per_second=min(speeds, default=0.0),
        )

    def _sending(self, stage: int, rows: int) -> Floats:
        """(places,): seconds for which a batch of so many rows occupies the link after each place.

        Tied weights go with it once.
        """
        speed = self._link(stage).bytes_per_second
        size = (np.asarray(self.profile.crossing) * rows + self.layout.tied)[self.places]
        found: Floats = size / speed if speed else np.zeros(len(self.places))
        return found

    @cached_property
    def _sends(self) -> list[Floats]:
        """For every stage what its link is busy with, for a whole batch."""
        return [self._sending(stage, sum(self.share)) for stage in range(self.stages)]

    def busy(self, stage: int, end: int) -> Floats:
        """(end,): seconds of a batch for which a stage keeps its worker, or its link, busy.

        Args:
            stage: which; it begins at every place before `end`.
            end: the place where it ends.
        """
        return self._busy(stage, np.arange(end), np.array(end))

    def _busy(self, stage: int, starts: Places, ends: Places) -> Floats:
        """The same between these places."""
        work = np.max([until[ends] - until[starts] for until in self._works[stage]], axis=0)
        work = work + len(self.share) * self.profile.overhead_seconds
        sending = self._sends[stage][ends]
        both: Floats = np.maximum(work, sending) if self.profile.overlap else work + sending
        return both

    def passing(self, stage: int, end: int) -> Floats:
        """(end,): seconds that the largest micro-batch takes for a stage, and to the next."""
        part = max(self.share) / sum(self.share)
        work = np.max([until[end] - until[:end] for until in self._works[stage]], axis=0)
        hop = self._link(stage).latency_seconds + self._sends[stage][end] * part
        found: Floats = work * part + self.profile.overhead_seconds + hop
        return found

    # -- memory -------------------------------------------------------------------------------

    @cached_property
    def flying(self) -> int:
        """How many micro-batches of a replica are under way at most, see `Passes.map`."""
        ahead = batches_under_way(self.stages, self.replicas, self.layout.count)
        return ahead * len(self.share)

    @property
    def in_flight(self) -> int:
        """How many groups of sequences all replicas have under way."""
        return self.request.in_flight or self.stages * self.replicas + 1

    @property
    def groups(self) -> int:
        """How many of them one replica has at most, see `Sessions.open`."""
        return -(-self.in_flight // self.replicas)

    @property
    def group_rows(self) -> int:
        """The rows of a group: those of the example, or of a micro-batch if that is asked for."""
        given = self.request.num_microbatches
        return self.profile.batch_size if given == "auto" else self.layout.most_rows

    @cached_property
    def _until_states(self) -> Floats:
        """(places,): bytes of the states, of all groups, that calls before each place make."""
        profile = self.profile
        states = np.asarray(profile.states or (0.0,) * profile.num_calls)
        found: Floats = _until(states * (self.group_rows * self.groups))[self.places]
        return found

    @cached_property
    def _until_weights(self) -> Floats:
        sharing = self.replicas if self.case.sums == "shared" else 1
        found: Floats = _until(self.layout.weights)[self.places] / sharing
        return found

    @cached_property
    def _live(self) -> Floats:
        """(places - 1,): the most bytes that are live at any call between two places for a cut."""
        profile, rows = self.profile, self.layout.most_rows
        made = np.asarray(profile.outputs or (0.0,) * profile.num_calls) * rows
        found: Floats = np.maximum.reduceat(self.layout.boundary[:-1] + made, self.places[:-1])
        return found

    @cached_property
    def _waiting(self) -> Floats:
        """(places,): bytes of what waits to enter a stage that begins there."""
        rows = (self.flying - 1) * self.layout.most_rows, (self.groups - 1) * self.group_rows
        found: Floats = np.asarray(self.profile.boundary)[self.places] * max(rows)
        return found

    def needed(self, end: int) -> Floats:
        """(end,): bytes that a stage holds which begins at every place before `end`."""
        weights = self._until_weights[end] - self._until_weights[:end]
        states = self._until_states[end] - self._until_states[:end]
        live = np.maximum.accumulate(self._live[:end][::-1])[::-1]
        tied = self.layout.tied[self.places][:end]
        found: Floats = weights + tied + states + live + self._waiting[:end]
        return found

    @cached_property
    def caps(self) -> list[float]:
        """Bytes that the worker of every stage may hold, in the replica where that is least."""
        caps = self.request.memory.caps(self.profile)
        return [float(min(caps[list(homes)])) for homes in zip(*self.case.parts, strict=True)]

    # -- the best -----------------------------------------------------------------------------

    def within(self, limit: float) -> list[int] | None:
        """The edges of stages of which none is busy for longer than this; `None` if there are none.

        A stage that begins later is busy for less, so of all places where the one before may end,
        the last one before an end is the best.
        """
        count = len(self.places)
        numbers = np.arange(count)
        able = numbers == 0  # where the stages so far may end
        came = []
        for stage in range(self.stages):
            latest = np.maximum.accumulate(np.where(able, numbers, -1))
            starts = np.concatenate([[-1], latest[:-1]])
            able = (starts >= 0) & (self._busy(stage, starts, numbers) <= limit)
            came.append(starts)
        if not able[-1]:
            return None
        edges = [count - 1]
        for starts in reversed(came):
            edges.append(int(starts[edges[-1]]))
        return edges[::-1]

    @cached_property
    def free(self) -> Flow:
        """The stages whose busiest takes the least time, whatever they hold."""
        best, least = Flow(self, self.within(math.inf) or []), 0.0
        while best.busiest - least > _PRECISION * best.busiest:
            middle = (best.busiest + least) / 2
            found = self.within(middle)
            if found is None:
                least = middle
            else:
                best = Flow(self, found)
        return best

    def fits(self, flow: Flow) -> bool:
        """Whether every stage fits the memory."""
        return all(peak <= cap for peak, cap in zip(flow.peaks, self.caps, strict=True))

    def flow(self) -> Flow:
        """The stages whose busiest takes the least time, of those that fit the memory.

        Raises:
            PlanError: none do.
        """
        if self.fits(self.free):
            return self.free

        def busy(stage: int, end: int) -> Floats:
            return self.busy(stage, end) + self._over(stage, end)

        found = _sweep(self.stages, len(self.places), busy, np.maximum)
        if found is None:
            raise self._too_little()
        return Flow(self, found)

    def with_lowest_latency(self, flow: Flow) -> Flow:
        """Of the stages whose busiest takes no longer, those with the lowest latency of a batch."""
        least = flow.busiest * _ROUNDING

        def passing(stage: int, end: int) -> Floats:
            is_short = self.busy(stage, end) <= least
            found: Floats = np.where(is_short, self.passing(stage, end), np.inf)
            return found + self._over(stage, end)

        found = _sweep(self.stages, len(self.places), passing, np.add)
        return flow if found is None else Flow(self, found)

    def _over(self, stage: int, end: int) -> Floats:
        """(end,): zero where the stage fits the memory, else infinite."""
        if math.isinf(self.caps[stage]):
            return np.zeros(end)
        found: Floats = np.where(self.needed(end) <= self.caps[stage], 0.0, np.inf)
        return found

    @property
    def bound(self) -> float:
        """Seconds of a batch with the best cuts of these, without a memory limit."""
        return self.free.seconds

    def _too_little(self) -> ShortError:
        """The error that says how close it is, and of what there is too much."""

        def missing(stage: int, end: int) -> Floats:
            return self.needed(end) - self.caps[stage]

        found = _sweep(self.stages, len(self.places), missing, np.maximum)
        edges = found or [0, len(self.places) - 1]
        short = [float(missing(s, end)[start]) for s, (start, end) in enumerate(pairwise(edges))]
        stage = short.index(max(short))
        start, end = edges[stage : stage + 2]
        weights = float(self._until_weights[end] - self._until_weights[start])
        states = float(self._until_states[end] - self._until_states[start])
        needed = self.caps[stage] + short[stage]
        first, last = self.places[start], self.places[end] - 1
        labels, device = self.profile.labels, self.profile.devices[self.case.parts[0][stage]]
        text = (
            f"no plan for inference fits the memory: at best, the stage of {labels[first]} to "
            f"{labels[last]} takes {show_bytes(needed)}, and {device} may hold "
            f"{show_bytes(self.caps[stage])}: {show_bytes(short[stage])} too little. Of these, "
            f"weights are {show_bytes(weights)}, and the states of {self.groups} groups of "
            f"{self.group_rows} rows {show_bytes(states)}. Use more devices, a higher "
            "memory_limit=, a smaller in_flight=, or an example with fewer rows or shorter texts"
        )
        return ShortError(text, short[stage])


def _until(numbers: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(numbers)])


def _sweep(
    stages: int, places: int, cost: Callable[[int, int], Floats], join: Join
) -> list[int] | None:
    """The cuts with the least sum, or the least maximum, of the costs of all stages.

    Args:
        stages: how many.
        places: how many there are, the two ends among them.
        cost: of a stage that ends at a place, for every place before that where it may begin.
        join: `np.add` or `np.maximum`.

    Returns:
        the place where every stage begins, with the last one's end; `None` if it costs an infinite
        amount.
    """
    value = np.full(places, np.inf)
    value[0] = 0.0 if join is np.add else -np.inf
    came: list[list[int]] = []
    for stage in range(stages):
        after, before = np.full(places, np.inf), [0] * places
        ends = range(stage + 1, places) if stage + 1 < stages else [places - 1]
        for end in ends:
            joined = join(value[:end], cost(stage, end))
            start = int(np.argmin(joined))
            after[end], before[end] = joined[start], start
        value = after
        came.append(before)
    if value[-1] == np.inf:
        return None
    edges = [places - 1]
    for before in reversed(came):
        edges.append(before[edges[-1]])
    return edges[::-1]


@dataclass(frozen=True, eq=False)
class Flow:
    """A steady flow through some stages.

    Attributes:
        search: what found them.
        edges: where each begins and the last one ends, as places of the search.
    """

    search: _Search
    edges: Sequence[int]

    def with_lowest_latency(self) -> Flow:
        """As fast a flow with the lowest latency of a batch."""
        return self.search.with_lowest_latency(self)

    @cached_property
    def busiest(self) -> float:
        """Seconds of a batch for which the busiest worker or link works."""
        spans = enumerate(pairwise(self.edges))
        return max(float(self.search.busy(s, end)[start]) for s, (start, end) in spans)

    @property
    def seconds(self) -> float:
        """Seconds from batch to batch."""
        return max(self.busiest, self.search.profile.pass_seconds)

    @cached_property
    def way_seconds(self) -> float:
        """Seconds of one batch alone: through all stages, its micro-batches one after another."""
        share, spans = self.search.share, enumerate(pairwise(self.edges))
        through = sum(float(self.search.passing(s, end)[start]) for s, (start, end) in spans)
        more = self.busiest * (1 - max(share) / sum(share))
        return through + more + self.search.profile.pass_seconds

    @property
    def way(self) -> Way:
        """What kind of plan it is."""
        if self.search.stages == 1:
            return "one device" if self.search.replicas == 1 else "data parallel"
        return "pipeline"

    @cached_property
    def peaks(self) -> list[float]:
        """Bytes that every stage holds at most."""
        return [float(self.search.needed(end)[start]) for start, end in pairwise(self.edges)]

    def candidate(self, chosen: Flow) -> Candidate:
        """What a plan says of it, in which `chosen` was chosen."""
        excess = self.seconds / chosen.seconds - 1
        why = f"{excess:.1%} slower" if excess > 0 else "as fast, with a higher latency"
        if excess < 0:
            why = f"{-excess:.1%} faster, which may be noise, or is not asked for"
        return Candidate(
            way=self.way,
            schedule="",
            num_microbatches=self.search.layout.count,
            replicas=self.search.replicas,
            stages=self.search.stages,
            predicted_step_seconds=self.seconds,
            threads=self.search.profile.threads,
            memory_bytes=round(max(self.peaks)),
            why="chosen" if self is chosen else why,
        )

    def plan(self) -> Plan:
        """The plan that runs it."""
        search, profile = self.search, self.search.profile
        parts = search.case.parts
        devices = [tuple(profile.devices[home] for home in part) for part in parts]
        is_alike = len(set(devices)) == 1
        every = [tuple(self._stages(part)) for part in (parts[:1] if is_alike else parts)]
        return Plan(
            fingerprint=profile.fingerprint,
            batch_size=profile.batch_size,
            num_microbatches=search.layout.count,
            schedule=SCHEDULE,
            stages=every[0],
            predicted_step_seconds=self.seconds,
            bound_seconds=search.bound,
            one_device_seconds=None,
            overhead_seconds=profile.overhead_seconds,
            pass_seconds=profile.pass_seconds,
            overlap=profile.overlap,
            memory_limit=search.request.memory.limit,
            boundary_dtype=search.request.boundary_dtype,
            other_replicas=tuple(devices[1:]),
            other_stages=tuple(every[1:]),
            threads=profile.threads,
            note=search.case.note,
            inference=True,
            way_seconds=self.way_seconds,
            in_flight=search.in_flight,
        )

    def _stages(self, part: Sequence[int]) -> Iterator[StagePlan]:
        """The stages of the replica on these devices."""
        search, layout, profile = self.search, self.search.layout, self.search.profile
        forward, rows = layout.forward, layout.most_rows
        homes = [profile.devices[home] for home in part]
        states = search._until_states
        for stage, (start, end) in enumerate(pairwise(self.edges)):
            first, last = int(search.places[start]), int(search.places[end])
            hop = profile.link(homes[stage - 1], homes[stage]) if stage else Link()
            tied = float(layout.tied[first]) / len(search.share)
            speed, size = hop.bytes_per_second, profile.crossing[first] * rows + tied
            yield StagePlan(
                worker=stage,
                device=homes[stage],
                calls=(first, last),
                first=profile.labels[first],
                last=profile.labels[last - 1],
                weight_bytes=sum(profile.weights[first:last]),
                input_bytes=round(layout.boundary[first]),
                forward_seconds=float(forward[part[stage], first:last].sum()),
                backward_seconds=0.0,
                latency_seconds=hop.latency_seconds,
                transfer_seconds=size / speed if speed else 0.0,
                held_bytes=round(layout.boundary[first]),
                memory_bytes=round(self.peaks[stage]),
                state_bytes=round(float(states[end] - states[start])),
            )
