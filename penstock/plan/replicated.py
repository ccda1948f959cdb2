"""Plans of several replicas: the devices, stages and micro-batches of each.

All replicas have the same cuts. If their devices differ, those that are faster run more
micro-batches. The cuts are looked for on each of the different lists of devices that a replica may
have, and tried on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from penstock.errors import PlanError
from penstock.plan.alternatives import adding_seconds, chain_seconds, gathering_seconds
from penstock.plan.candidates import Option
from penstock.plan.decisions import Candidate
from penstock.plan.layout import Layout, Memory
from penstock.plan.plan import Plan
from penstock.plan.request import Auto, Request
from penstock.plan.shares import Sums, dealt, rows_of_replicas
from penstock.plan.shortage import NothingFitsError
from penstock.plan.stages import StageSearch, nth_smallest
from penstock.profile.data import Link, Profile
from penstock.profile.rows import split_rows
from penstock.schedule import SCHEDULES

Devices = tuple[str, ...]

_LEADS = 3  # different lists of devices on which the cuts are looked for
_TRIED = 6  # plans for one of them that are tried on all: how they can be shared is not known yet
_TRYING = 1000  # what that costs for each list of devices, in actions, besides simulation


@dataclass(frozen=True)
class Sharing:
    """Replicas, and what they have in common.

    Attributes:
        replicas: how many there are.
        sums: how they add up gradients.
        effort: how many actions may be simulated to find the best plan.
        beat: the seconds of a step that was found already, see `StageSearch`.
    """

    replicas: int
    sums: Sums
    effort: float
    beat: float = math.inf


def plans_of_replicas(
    profile: Profile, request: Request, sharing: Sharing, most: int, others: Sequence[Candidate]
) -> list[Plan]:
    """The best few plans of so many replicas; to their time comes that of adding up gradients.

    Args:
        profile: what was measured.
        request: what is asked for.
        sharing: how many replicas, and what they have in common.
        most: how many plans.
        others: what the plans are compared with: one device, data parallelism, and more.

    Raises:
        PlanError: there is none; or there are no such parts of the devices.
        InputError: as `penstock.plan.search.plan` does.
    """
    request = _possible(profile, request, sharing.replicas)
    found: list[_Tried] = []
    errors: list[PlanError] = []
    possible = divisions(profile, sharing.replicas)
    sharing = replace(sharing, effort=sharing.effort / len(possible))
    for parts in possible:
        division = _Division(profile, request, sharing, parts)
        for lead in division.leads:
            beat = min(sharing.beat, nth_smallest([tried.seconds for tried in found], most))
            try:
                found += division.tried(lead, most, beat)
            except PlanError as error:
                errors.append(error)
    if not found:
        raise errors[0]
    best = sorted(found, key=lambda tried: tried.seconds)[:most]
    return [tried.plan(others) for tried in best]


def _possible(profile: Profile, request: Request, replicas: int) -> Request:
    """The request, if replicas can do what it asks for.

    Raises:
        PlanError: they cannot.
    """
    count = request.num_microbatches
    if profile.batch_size < replicas:
        raise PlanError(f"{replicas} replicas cannot share {profile.batch_size} rows; give more")
    if count != "auto" and count < replicas:
        raise PlanError(f"{replicas} replicas cannot share {count} micro-batches; give more")
    halves = request.schedule == "fitted" or (
        request.schedule != "auto" and SCHEDULES[request.schedule].splits_backward
    )
    if halves:
        raise PlanError(
            f"{request.schedule} may halve backwards, which replicas do not; choose another one"
        )
    if profile.no_recomputing:
        if request.recompute == "auto":
            return replace(request, recompute="none")
        if request.replicas == "auto" and request.recompute != "none":
            raise PlanError(f"replicas cannot recompute: {profile.no_recomputing}")
    return request


def divisions(profile: Profile, replicas: int) -> list[list[Devices]]:
    """The devices in as many parts of one size: neighbours together, and neighbours apart.

    Raises:
        PlanError: there are no such parts.
    """
    devices = profile.devices
    each, rest = divmod(len(devices), replicas)
    if rest or not each:
        raise PlanError(
            f"{replicas} replicas need as many parts of the devices, all of one size, and there "
            f"are {len(devices)}: {', '.join(devices)}"
        )
    together = [devices[k : k + each] for k in range(0, len(devices), each)]
    apart = [devices[k::replicas] for k in range(replicas)]
    if len(set(together)) == 1 or sorted(together) == sorted(apart):
        return [together]
    return [together, apart]


@dataclass(frozen=True)
class _Tried:
    """Stages that were tried on the devices of all replicas.

    Attributes:
        division: the devices.
        seconds: of a step, with the time in which gradients are added up.
        total: how many micro-batches there are.
        options: the stages of every replica, with its micro-batches.
        shares: how many these are, if not equally many.
        considered: what they were compared with.
    """

    division: _Division
    seconds: float
    total: int
    options: tuple[Option, ...]
    shares: tuple[int, ...] = ()
    considered: tuple[Candidate, ...] = ()

    def plan(self, others: Sequence[Candidate]) -> Plan:
        """The plan that runs them, compared with others, too."""
        first = self.options[0]
        are_alike = self.division.are_alike
        different = [first] if are_alike else dict.fromkeys(self.options)
        stages = {option: tuple(option.stage_plans()) for option in different}
        every = sorted([*others, *self.considered], key=lambda candidate: candidate.seconds)
        return replace_fields(
            first.plan(),
            batch_size=self.division.profile.batch_size,
            num_microbatches=self.total,
            other_replicas=tuple(self.division.parts[1:]),
            other_stages=() if are_alike else tuple(stages[o] for o in self.options[1:]),
            shares=self.shares,
            predicted_step_seconds=self.seconds,
            bound_seconds=max(option.bound for option in different),
            one_device_seconds=others[0].predicted_step_seconds if others else None,
            data_parallel_seconds=others[1].predicted_step_seconds if others else None,
            boundary_dtype=self.division.request.boundary_dtype,
            considered=tuple(every),
        )


class _Division:
    """The devices of every replica.

    Args:
        profile: what was measured.
        request: what is asked for.
        sharing: what the replicas have in common.
        parts: the devices of each.
    """

    def __init__(
        self, profile: Profile, request: Request, sharing: Sharing, parts: Sequence[Devices]
    ) -> None:
        self.profile = profile.of_replica
        self.request = request
        self.sharing = sharing
        self.parts = parts
        self.different = list(dict.fromkeys(parts))
        self.are_alike = len(self.different) == 1
        # In one process, replicas of several workers each could deadlock with unequal shares:
        # each waits for the other's turn to add gradients.
        must_be_even = sharing.sums != "chained" and len(parts[0]) > 1
        self.are_even = self.are_alike or must_be_even
        seconds = Layout(profile, 1).seconds.sum(axis=1)
        speed = dict(zip(profile.devices, 1 / seconds, strict=True))
        self.speed = {part: float(sum(speed[name] for name in part)) for part in self.different}

    def memory_of(self, part: Devices, is_even: bool = True) -> Memory:
        """What the replica on these devices holds besides activations."""
        return replace(
            self.request.memory,
            replicas=self.sharing.replicas,
            sums=self.sharing.sums,
            is_first=part == self.parts[0],
            is_even=is_even,
        )

    @property
    def leads(self) -> list[Devices]:
        """The lists of devices on which cuts are looked for: the fastest, and the smallest."""

        def memory(part: Devices) -> float:
            own, of = replace_fields(self.profile, devices=part), self.memory_of(part)
            return float(min(of.caps(own))) / of.per_weight(1)

        fastest = max(self.different, key=lambda part: self.speed[part])
        slowest = min(self.different, key=lambda part: self.speed[part])
        return list(dict.fromkeys([fastest, slowest, min(self.different, key=memory)]))[:_LEADS]

    def tried(self, lead: Devices, most: int, beat: float) -> list[_Tried]:
        """The best few cuts that suit these devices, tried on all.

        Args:
            lead: the devices.
            most: how many are wanted.
            beat: the seconds of a step that was found already.

        Raises:
            PlanError, InputError: as `plans_of_replicas` does.
        """
        whole, replicas = self.profile.batch_size, self.sharing.replicas
        part = self.speed[lead] / sum(self.speed[own] for own in self.parts)
        if self.are_even:
            part = 1 / replicas
        wanted = self.request.num_microbatches
        largest = self._total(whole, 1.0)
        rows = min(whole, _whole(whole * part))
        count: int | Auto = "auto"
        if wanted != "auto":
            count = min(rows, _whole(wanted * part))
        own = replace_fields(self.profile, devices=lead, batch_size=rows)
        asked = replace(self.request, replicas=1, num_microbatches=count)
        effort = self.sharing.effort / len(self.leads)
        beat *= max(1.0, rows / (whole * part))  # whose rows were not rounded up
        search = StageSearch(
            *(own, asked, self.memory_of(lead)),
            halves=False,
            effort=effort,
            beat=beat,
            rows=self._first_rows if self.are_even else None,
        )
        found: list[_Tried] = []
        trying = most if self.are_alike else max(most, _TRIED)
        try:
            options = search.ordered(trying)
        except NothingFitsError as error:
            error.replicas, error.batch_size = replicas, whole
            raise
        if wanted == "auto" and self.request.replicas == "auto":
            options = self._accepted(options, part)
        for option in options[:trying]:
            total = self._total(option.layout.count, part)
            effort -= 2 * total * len(option.stretches) + _TRYING * len(self.different)
            if len(found) >= most and effort < 0:
                break
            tried = self._replicated(option, total)
            if tried is None:
                continue
            considered = [option.candidate(option)]
            if self.are_alike:  # else the others were not tried on all devices
                considered = [*(o.candidate(option) for o in options), *search.rejected]
            factor = tried.seconds / option.seconds
            mine = [self._candidate(c, factor, largest, part) for c in considered]
            found.append(replace(tried, considered=tuple(mine)))
        if not found:
            raise PlanError(
                f"{replicas} replicas: a stage that fits the memory of {', '.join(lead)} does not "
                "fit that of the others"
            )
        return found

    def _accepted(self, options: Sequence[Option], part: float) -> list[Option]:
        """Those without micro-batches that are smaller than all that were measured.

        The model may not take them: BatchNorm, for one, refuses a single row.

        Raises:
            PlanError: there are none.
        """
        profile = self.profile
        least = max(profile.on(device).rows[0] for device in profile.devices)
        accepted = [
            option
            for option in options
            if profile.batch_size // self._total(option.layout.count, part) >= least
        ]
        if not accepted:
            raise PlanError(
                f"{self.sharing.replicas} replicas would have micro-batches of fewer than {least} "
                "rows, the fewest that were measured"
            )
        return accepted

    def _total(self, count: int, part: float) -> int:
        """How many micro-batches all replicas run, if one of them runs `count`, a part of them."""
        wanted, most = self.request.num_microbatches, self.profile.batch_size
        total = round(count / part) if wanted == "auto" else wanted
        return max(self.sharing.replicas, min(total, most))

    def _rows(self, total: int, weights: Sequence[int]) -> list[tuple[int, ...]]:
        """The rows of each replica's micro-batches, of so many."""
        rows = split_rows(self.profile.batch_size, total)
        return rows_of_replicas(rows, tuple(weights), self.sharing.sums)

    def _first_rows(self, count: int) -> tuple[int, ...]:
        """The rows of the first of replicas that run equally many: no other one has more."""
        replicas = self.sharing.replicas
        return self._rows(self._total(count, 1 / replicas), [1] * replicas)[0]

    def _replicated(self, option: Option, total: int) -> _Tried | None:
        """The stages of an option on all parts, with so many micro-batches.

        `None` if they do not fit the memory of one.
        """
        parts = self.parts
        if self.are_alike:
            seconds = option.seconds + self._adding(option, option.layout.count, option.seconds)
            return _Tried(self, seconds, total, (option,) * len(parts))
        for shares in self._shares(option, total):
            tried = self._with_shares(option, total, shares)
            if tried is not None:
                return tried
        return None

    def _shares(self, option: Option, total: int) -> list[tuple[int, ...]]:
        """How many of so many micro-batches each replica may run; nothing for equally many.

        The first way lets all end early. In one process another one needs less memory.
        """
        if self.are_even:
            return [()]
        largest = -(-self.profile.batch_size // total)
        ones = {part: self._option(option, part, [largest]) for part in self.different}
        found = _shared([ones[part] for part in self.parts], total)
        if self.sharing.sums == "chained":
            return [found]
        even = tuple(map(len, dealt(total, (1,) * len(found))))
        return [()] if found == even else [found, ()]

    def _with_shares(self, option: Option, total: int, shares: tuple[int, ...]) -> _Tried | None:
        """The same with these shares of the micro-batches."""
        parts, is_even = self.parts, not shares
        of_each = self._rows(total, shares or [1] * len(parts))
        pairs = list(zip(parts, of_each, strict=True))
        every = {pair: self._option(option, *pair, is_even) for pair in dict.fromkeys(pairs)}
        for own in every.values():
            caps = own.memory.caps(own.layout.profile)
            if any(peak > cap for peak, cap in zip(own.peaks, caps, strict=True)):
                return None
        seconds = max(own.seconds for own in every.values())
        seconds += self._adding(option, max(map(len, of_each)), seconds)
        return _Tried(self, seconds, total, tuple(every[pair] for pair in pairs), shares)

    def _option(
        self, found: Option, part: Devices, rows: Sequence[int], is_even: bool = True
    ) -> Option:
        """The stages of an option on one part, with micro-batches of so many rows each."""
        own = replace_fields(self.profile, devices=part, batch_size=sum(rows))
        layout = Layout(own, len(rows), rows)
        return Option(layout, found.stretches, found.name, self.memory_of(part, is_even))

    def _adding(self, option: Option, share: int, seconds: float) -> float:
        """Seconds that adding up the gradients of all replicas takes besides their passes.

        Args:
            option: the stages of a replica.
            share: how many micro-batches each runs.
            seconds: that it takes them.
        """
        held = [0.0] * option.num_workers
        for stretch in option.stretches:
            held[stretch.worker] += sum(self.profile.weights[stretch.start : stretch.stop])
        adding = min(kind.added_per_second for kind in self.profile.kinds.values())
        if self.sharing.sums == "shared":
            return adding_seconds(held, self.sharing.replicas, adding)
        every = [(held[place], link) for place in range(len(held)) for link in self._links(place)]
        replicas = self.sharing.replicas
        if self.sharing.sums == "gathered":
            each = (gathering_seconds(s, replicas, share, k, adding, seconds) for s, k in every)
            return max(each, default=0.0)
        return max(chain_seconds(size, replicas, share, link, adding) for size, link in every)

    def _links(self, place: int) -> Iterator[Link]:
        """The links by which gradients of the workers at this place of all replicas go."""
        homes = [part[place] for part in self.parts]
        pairs = list(zip(homes, [*homes[1:], homes[0]], strict=True))
        if self.sharing.sums == "gathered":
            pairs = [(home, homes[0]) for home in homes if home != homes[0]]
        for one, other in dict.fromkeys(pairs):
            yield self.profile.link(one, other)

    def _candidate(self, found: Candidate, factor: float, most: int, part: float) -> Candidate:
        """A candidate for one replica as a candidate for all replicas.

        Args:
            found: the candidate for one replica.
            factor: how many times as long a step takes for all replicas.
            most: the largest number of micro-batches of a batch.
            part: the share of the micro-batches that the one replica runs.
        """
        seconds = found.predicted_step_seconds
        return replace_fields(
            found,
            way="pipeline" if found.stages > 1 else "data parallel",
            replicas=self.sharing.replicas,
            num_microbatches=min(round(found.num_microbatches / part), most),
            predicted_step_seconds=None if seconds is None else seconds * factor,
        )


def _whole(share: float) -> int:
    """The share rounded up, at least 1; products of fractions may be a little too large."""
    return max(1, math.ceil(share - 1e-9))


def _shared(options: Sequence[Option], total: int) -> tuple[int, ...]:
    """How many micro-batches every replica runs, so that the last one to finish does so early.

    Args:
        options: of every replica, its stages with one micro-batch.
        total: the micro-batches; as many as replicas at least.
    """
    overhead = 2 * options[0].layout.profile.overhead_seconds
    fill, pace = [], []
    for option in options:
        busy = [0.0] * option.num_workers
        costs = option.layout.costs(option.stretches)
        both = zip(option.stretches, costs.forward, costs.backward, strict=True)
        for stretch, forward, backward in both:
            busy[stretch.worker] += forward + backward + overhead
        pace.append(max(busy))
        fill.append(sum(busy) - max(busy))
    shares = [1] * len(options)
    for _ in range(total - len(options)):
        next_one = min(range(len(shares)), key=lambda k: fill[k] + (shares[k] + 1) * pace[k])
        shares[next_one] += 1
    return tuple(shares)
