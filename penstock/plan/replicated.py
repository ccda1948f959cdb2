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
from penstock.plan.alternatives import adding_seconds, chain_seconds
from penstock.plan.candidates import Option
from penstock.plan.layout import Layout, Stretch
from penstock.plan.plan import Candidate, Plan
from penstock.plan.request import Auto, Request
from penstock.plan.stages import StageSearch
from penstock.profile.data import Link, Profile
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
        in_one_memory: whether they have the weights, their gradients and the optimizer's state in
            common; otherwise each has its own, and gradients go from one to the next.
        effort: how many actions may be simulated to find the best plan.
    """

    replicas: int
    in_one_memory: bool
    effort: float


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
    request = _without_halves(profile, request, sharing.replicas)
    found: list[Plan] = []
    errors: list[PlanError] = []
    divisions = _divisions(profile, sharing.replicas)
    sharing = replace(sharing, effort=sharing.effort / len(divisions))
    for parts in divisions:
        division = _Division(profile, request, sharing, parts)
        for lead in division.leads:
            try:
                found += division.plans(lead, most, others)
            except PlanError as error:
                errors.append(error)
    if not found:
        raise errors[0]
    return sorted(found, key=lambda plan: plan.predicted_step_seconds)[:most]


def _without_halves(profile: Profile, request: Request, replicas: int) -> Request:
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
    if request.replicas == "auto" and profile.no_recomputing:
        if request.recompute not in ("auto", "none"):
            raise PlanError(f"replicas cannot recompute: {profile.no_recomputing}")
        return replace(request, recompute="none")
    return request


def _divisions(profile: Profile, replicas: int) -> list[list[Devices]]:
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
        self.memory = replace(request.memory, replicas=len(parts), is_shared=sharing.in_one_memory)
        self.different = list(dict.fromkeys(parts))
        seconds = Layout(profile, 1).seconds.sum(axis=1)
        speed = dict(zip(profile.devices, 1 / seconds, strict=True))
        self.speed = {part: float(sum(speed[name] for name in part)) for part in self.different}

    @property
    def leads(self) -> list[Devices]:
        """The lists of devices on which cuts are looked for: the fastest, and the smallest."""

        def memory(part: Devices) -> float:
            own = replace_fields(self.profile, devices=part)
            return float(min(self.memory.caps(own)))

        fastest = max(self.different, key=lambda part: self.speed[part])
        slowest = min(self.different, key=lambda part: self.speed[part])
        return list(dict.fromkeys([fastest, slowest, min(self.different, key=memory)]))[:_LEADS]

    def plans(self, lead: Devices, most: int, others: Sequence[Candidate]) -> list[Plan]:
        """The best few plans whose cuts suit these devices.

        Raises:
            PlanError, InputError: as `plans_of_replicas` does.
        """
        whole, replicas = self.profile.batch_size, self.sharing.replicas
        part = self.speed[lead] / sum(self.speed[own] for own in self.parts)
        wanted = self.request.num_microbatches
        largest = whole if wanted == "auto" else min(wanted, whole)
        if len(self.different) == 1:
            part = 1 / replicas
        rows = min(whole, _whole(whole * part))
        count: int | Auto = "auto"
        if wanted != "auto":
            count = min(rows, _whole(wanted * part))
        own = replace_fields(self.profile, devices=lead, batch_size=rows)
        asked = replace(self.request, replicas=1, num_microbatches=count)
        effort = self.sharing.effort / len(self.leads)
        search = StageSearch(own, asked, self.memory, halves=False, effort=effort)
        found: list[Plan] = []
        for plan in search.plans(most if len(self.different) == 1 else max(most, _TRIED)):
            total = largest if wanted != "auto" else round(plan.num_microbatches / part)
            total = max(replicas, min(total, largest))
            effort -= 2 * total * len(plan.stages) + _TRYING * len(self.different)
            if len(found) >= most and effort < 0:
                break
            replicated = self._replicated(plan, total)
            if replicated is None:
                continue
            factor = replicated.predicted_step_seconds / plan.predicted_step_seconds
            tried = plan.considered
            if replicated.shares:  # the other candidates were not tried on all devices
                tried = tuple(c for c in tried if c.why == "chosen")
            mine = [self._candidate(c, factor, largest, part) for c in tried]
            every = sorted([*others, *mine], key=lambda candidate: candidate.seconds)
            found.append(
                replace_fields(
                    replicated,
                    one_device_seconds=others[0].predicted_step_seconds if others else None,
                    data_parallel_seconds=others[1].predicted_step_seconds if others else None,
                    considered=tuple(every),
                )
            )
        if not found:
            raise PlanError(
                f"{replicas} replicas: a stage that fits the memory of {', '.join(lead)} does not "
                "fit that of the others"
            )
        return found

    def _replicated(self, plan: Plan, total: int) -> Plan | None:
        """The stages of a plan on all parts, with so many micro-batches.

        `None` if they do not fit the memory of one.
        """
        parts = self.parts
        made = replace_fields(
            plan,
            batch_size=self.profile.batch_size,
            num_microbatches=total,
            other_replicas=tuple(parts[1:]),
        )
        if len(self.different) == 1:
            seconds = plan.predicted_step_seconds + self._adding(plan, plan.num_microbatches)
            return replace_fields(made, predicted_step_seconds=seconds)
        rows = -(-self.profile.batch_size // total)
        options = {part: self._option(plan, part, rows, 1) for part in self.different}
        shares = _shared([options[part] for part in parts], total)
        every = {
            (part, share): self._option(plan, part, rows, share)
            for part, share in zip(parts, shares, strict=True)
        }
        for option in every.values():
            caps = self.memory.caps(option.layout.profile)
            if any(peak > cap for peak, cap in zip(option.peaks, caps, strict=True)):
                return None
        seconds = max(option.seconds for option in every.values())
        of_each = [
            tuple(every[part, share].stage_plans())
            for part, share in zip(parts, shares, strict=True)
        ]
        return replace_fields(
            made,
            stages=of_each[0],
            other_stages=tuple(of_each[1:]),
            shares=tuple(shares),
            predicted_step_seconds=seconds + self._adding(plan, max(shares)),
            bound_seconds=max(option.bound for option in every.values()),
        )

    def _option(self, plan: Plan, part: Devices, rows: int, count: int) -> Option:
        """The stages of a plan on one part, with so many micro-batches of so many rows."""
        own = replace_fields(self.profile, devices=part, batch_size=rows * count)
        stretches = tuple(Stretch(s.worker, *s.calls, s.recompute) for s in plan.stages)
        return Option(Layout(own, count), stretches, plan.schedule, self.memory)

    def _adding(self, plan: Plan, share: int) -> float:
        """Seconds in which the gradients of all replicas are added up, after the last backward.

        Args:
            plan: the stages of a replica.
            share: how many micro-batches each runs.
        """
        held = [0.0] * plan.workers_per_replica
        for stage in plan.stages:
            held[stage.worker] += stage.weight_bytes
        adding = min(kind.added_per_second for kind in self.profile.kinds.values())
        if self.sharing.in_one_memory:
            return adding_seconds(held, self.sharing.replicas, adding)
        return max(
            chain_seconds(held[place], self.sharing.replicas, share, link, adding)
            for place in range(len(held))
            for link in self._links(place)
        )

    def _links(self, place: int) -> Iterator[Link]:
        """The links of the ring of the workers at this place of all replicas."""
        ring = [part[place] for part in self.parts]
        for one, other in dict.fromkeys(zip(ring, [*ring[1:], ring[0]], strict=True)):
            yield self.profile.links.get(f"{one}>{other}", Link())

    def _candidate(self, found: Candidate, factor: float, most: int, part: float) -> Candidate:
        """A pipeline of one replica as one of all."""
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


def _shared(options: Sequence[Option], total: int) -> list[int]:
    """How many micro-batches every replica runs, so that the last to end ends early.

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
    return shares
