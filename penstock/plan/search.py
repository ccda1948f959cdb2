"""Choosing the kind of plan: with each number of replicas, and of one device alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace as replace_fields

from penstock.errors import InputError, PlanError
from penstock.plan.alternatives import alternatives
from penstock.plan.decisions import SHORT, WORTH_FEWER, WORTH_THREADS, Candidate, fastest_of
from penstock.plan.flow import plans_of_flow
from penstock.plan.layout import Memory
from penstock.plan.plan import Plan
from penstock.plan.replicated import Sharing, plans_of_replicas
from penstock.plan.request import Auto, Cut, Limits, Recompute, Request
from penstock.plan.shortage import NothingFitsError
from penstock.plan.stages import EFFORT, nth_smallest, plans_of_stages
from penstock.profile.data import Profile


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
    inference: bool = False,
    in_flight: int | None = None,
) -> Plan:
    """Find the fastest plan of all kinds for the profile's devices.

    With `inference=True` that is the plan with the most forwards in a second, when as many batches
    are under way as keep all stages busy: see `penstock.plan.flow`.

    Everything but the profile is as in `penstock.plan.request.Request`.

    Args:
        profile: measured costs.

    Returns:
        the plan, with its predicted step time and the bound.

    Raises:
        PlanError: there are too few calls or places to cut for the devices; a cut is not possible;
            or nothing fits the memory (the message says what would).
        InputError: an unknown schedule, or more micro-batches than rows; or the profile has no
            backwards, and the plan is for training.
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
        inference=inference,
        in_flight=in_flight,
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
        profiles: for different numbers of workers that share the same cores, and so have different
            numbers of intra-op threads.
        request, most, limits: as of `plans`.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    request.check_count(profiles[0].batch_size)
    if request.inference:
        return plans_of_flow(profiles, request, most, limits or Limits())
    if any(profile.inference for profile in profiles):
        raise InputError(
            "the profile was measured for inference and has no backwards: plan with "
            "inference=True, or measure the model again without it"
        )
    try:
        return _on_any(profiles, request, most, limits or Limits())
    except NothingFitsError as error:
        raise error.explained() from error


def _on_any(profiles: Sequence[Profile], request: Request, most: int, limits: Limits) -> list[Plan]:
    """As `plans_on_any`; where nothing fits, the error does not say yet what would.

    Raises:
        PlanError, InputError: as `plan` does.
    """
    memory = limits.memory(request)
    if len(profiles) == 1 and request.replicas == 1:
        others = alternatives(profiles[0], memory)
        return plans_of_stages(profiles[0], request, most, others, memory=memory)
    found: list[Plan] = []
    fewer: list[Plan] = []
    errors: list[PlanError] = []
    workers = max(len(profile.devices) for profile in profiles)
    for profile in profiles:
        is_alone = len(profile.devices) == 1 < workers
        plans = _of_all_kinds(profile, request, most, limits, errors)
        (fewer if is_alone else found).extend(plans)
    measured = {(own.devices[0], own.threads) for own in profiles if len(own.devices) == 1}
    for profile in () if limits.all_devices else profiles:
        unknown = [
            d for d in dict.fromkeys(profile.devices) if (d, profile.threads) not in measured
        ]
        fewer += _of_one_device(profile, unknown, request, most, memory)
    if not found and not fewer:
        raise errors[0]
    return _compared(sorted(found, key=_seconds), sorted(fewer, key=_seconds), most)


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
    failed: list[PlanError] = []
    memory = limits.memory(request)
    others = alternatives(profile, memory, replicas=not is_free or bool(why))
    numbers = request.replica_numbers(number, bool(why))
    effort = EFFORT / len(numbers)
    # Few stages first: it takes little to find what many have to beat.
    for replicas in reversed(numbers):
        if is_free and replicas > profile.batch_size:
            continue
        beat = nth_smallest([plan.predicted_step_seconds for plan in found], most)
        try:
            if replicas == 1:
                more = plans_of_stages(profile, request, most, others, effort, beat, memory)
            else:
                sharing = Sharing(replicas, limits.sums(profile.devices), effort, beat)
                more = plans_of_replicas(profile, request, sharing, most, others)
            found = [*more, *found]
        except PlanError as error:
            failed.append(error)
    errors += reversed(failed)
    return [replace_fields(plan, note=why) for plan in found]


def _of_one_device(
    profile: Profile, devices: Sequence[str], request: Request, most: int, memory: Memory
) -> list[Plan]:
    """The best few plans of one of these devices alone of several, where that may be chosen."""
    if request.replicas != "auto" or request.asks_for_stages or len(profile.devices) == 1:
        return []
    found: list[Plan] = []
    for device in devices:
        with suppress(PlanError):  # it does not fit the memory
            alone, effort = profile.alone(device), EFFORT / len(devices)
            others = alternatives(alone, memory)
            found += plans_of_stages(alone, request, most, others, effort, memory=memory)
    return found


def _compared(found: Sequence[Plan], fewer: Sequence[Plan], most: int) -> list[Plan]:
    """The best few of all plans, each with all that was considered.

    Args:
        found: plans on all devices, the fastest first.
        fewer: plans that leave out devices; preferred if they are clearly faster.
        most: how many plans.
    """
    best, *others = [*found, *fewer]
    if fewer and (not found or _seconds(found[0]) >= WORTH_FEWER * _seconds(fewer[0])):
        best, *others = [fewer[0], *found, *fewer[1:]]
    ordered = _fewer_threads_first([best, *sorted(others, key=_seconds)])
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
            one_device_seconds=fastest_of(alone),
            data_parallel_seconds=fastest_of(parallel),
            considered=tuple(sorted(considered, key=lambda candidate: candidate.seconds)),
        )
        for plan in ordered[:most]
    ]


def _fewer_threads_first(ordered: Sequence[Plan]) -> list[Plan]:
    """The same plans; for short steps one worker with fewer threads if more are hardly faster."""
    best = ordered[0]
    if _seconds(best) >= SHORT:
        return list(ordered)
    enough = [
        plan
        for plan in ordered
        if len(plan.devices) == len(best.devices) == 1
        and plan.threads < best.threads
        and _seconds(plan) <= WORTH_THREADS * _seconds(best)
    ]
    first = enough[:1]
    return [*first, *(plan for plan in ordered if plan not in first)]


def _compared_with(found: Candidate, best: Plan) -> Candidate:
    """A candidate, with a finding that compares it with the best plan of all kinds.

    Its finding so far compares it with candidates of its own kind only.
    """
    seconds, chosen = found.predicted_step_seconds, best.predicted_step_seconds
    if seconds is None:
        return found
    was_chosen = found.why == "chosen"  # of its own kind, or, if there are several plans, of one
    is_final = found in best.considered if was_chosen else seconds == chosen
    if is_final:
        return found
    if seconds > chosen:
        return replace_fields(found, why=f"{seconds / chosen - 1:.1%} slower")
    if found.way == "one device":
        has_more = len(best.devices) == 1 and found.threads > best.threads
        reason = "with more threads" if has_more else "which may be noise"
        return replace_fields(found, why=f"{1 - seconds / chosen:.1%} faster, {reason}")
    if found.only_compared:
        how = "not possible" if best.note else "not asked for"
        return replace_fields(found, why=f"{1 - seconds / chosen:.1%} faster, and {how}")
    return replace_fields(found, why="as fast")


def _seconds(plan: Plan) -> float:
    return plan.predicted_step_seconds
