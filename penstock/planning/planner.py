"""From a captured program to a plan: everything checked first, then measured, then chosen."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace as replace_fields

from penstock.capture import Program
from penstock.capture.one_replica import why_in_turns, why_one_replica
from penstock.capture.states import check_parts
from penstock.devices.choice import threads_per_worker
from penstock.display.terminal import Progress
from penstock.errors import InputError, PlanError
from penstock.plan import Plan
from penstock.plan.decisions import SHORT
from penstock.plan.request import Limits, Request
from penstock.plan.search import plans_on_any
from penstock.plan.text import advice, launches
from penstock.planning.overheads import with_overheads
from penstock.planning.tuning import measured
from penstock.profile import Profile
from penstock.profile.cache import cached_profiles
from penstock.profile.measure import SECONDS, bytes_across, weights_across, with_states
from penstock.workers.backend import Backend
from penstock.workers.probe import LinkProbe
from penstock.workers.thread_probe import ThreadProbe

_LOG = logging.getLogger("penstock")

TUNED = 4
"""Plans that are measured when that is asked for."""

PROMPT = 5.0
"""Seconds of a profile that the first step waits for."""

_WORTH = 0.98
"""A plan is better if its step takes less than this share of the time of the plan in use.

A profile has some noise.
"""

TOGETHER = 1.25
"""How much longer than a single profile several are measured, one for each number of workers.

This is a factor for the seconds of measuring in all. Each profile also takes time besides them, so
that together they take about one and a half times as long as one.
"""


_SHARE = 0.5
"""Of the seconds of a profile, those of another one that sees whether one thread is enough."""


class Planned(NamedTuple):
    """A plan, and the profile that it was made from.

    Attributes:
        plan: the plan.
        profile: `None` if the plan was given, if another process has made it, or if the plan in use
            stays and the new profile predicts nothing of it.
        stays: whether it is the plan in use, perhaps with new predictions.
    """

    plan: Plan
    profile: Profile | None
    stays: bool = False


def decide_plan(
    plan: Plan | str | os.PathLike[str] | None,
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backend: Backend,
    request: Request,
    tune: bool,
    progress: Progress | None,
) -> Planned:
    """The given plan, or the plan in the given file, or else a new one from `plan_for`.

    Where several processes run the script, one of them decides for all.

    Args:
        plan: the plan, or the name of its file.
        program, args, kwargs, request, tune, progress: as of `plan_for`.
        backend: the workers that it is for.

    Raises:
        PlanError: the program cannot be cut as the plan says, or as it was asked for.
        InputError: the file cannot be read, there are more micro-batches than rows, or the plan
            that was given has no room for what is asked for.
    """
    check_parts(program.train, request.states)
    with backend.operation("the planning"):
        made = costs = None
        if backend.leads and plan is not None:
            made = plan if isinstance(plan, Plan) else Plan.load(plan)
            if request.inference and not made.inference:
                raise InputError(
                    "inference=True, and the plan that was given is for training: make one by "
                    "penstock plan --inference or ps.plan(..., inference=True), or leave out "
                    "inference="
                )
            _check_same(made, request, tune)
            _check_room(made, request)
            backend.take(made, is_given=True)
            backend.check_replicas(made.replicas)
            if request.boundary_dtype is not None:
                made = replace_fields(made, boundary_dtype=request.boundary_dtype)
        elif backend.leads:
            if request.replicas != "auto":
                backend.check_replicas(request.replicas)
                if request.replicas > 1 and (why := why_in_turns(program)):
                    _LOG.warning(why)
            backend.wait(progress)  # what workers do to start would be in the profile
            planned = plan_for(
                program,
                args,
                kwargs,
                choices=backend.choices,
                request=request,
                limits=limits_of(backend),
                tune=tune,
                seconds=PROMPT,
                threads=backend.given_threads,
                where=backend.probe,
                progress=progress,
            )
            made, costs = planned.plan, planned.profile
            backend.take(made, is_given=False)
            for sentence in advice(made):
                _LOG.warning(sentence)
        decided = backend.broadcast_plan(program, made)
    edges = [first for stage in decided.stages for first, _, _ in stage.spans]
    program.check_cuts([edge for edge in edges if edge > 0])
    return Planned(decided, costs)


def warn_of_launches(planned: Planned) -> None:
    """Say which devices wait for the CPU that launches their work, if that was measured."""
    if planned.profile is not None:
        for sentence in launches(planned.plan, planned.profile):
            _LOG.warning(sentence)


def _check_same(plan: Plan, request: Request, tune: bool) -> None:
    """Raise if something is asked for that the plan which was given has otherwise.

    Raises:
        InputError: it has.
    """
    if tune:
        raise InputError("tune= chooses among plans, and one was given: leave out tune= or plan=")
    for name in ("num_microbatches", "schedule", "replicas"):
        wanted, found = getattr(request, name), getattr(plan, name)
        if wanted not in ("auto", found):
            raise InputError(
                f"{name}={wanted!r}, and the plan that was given has {name}={found!r}: leave out "
                f"{name}=, or plan="
            )


def _check_room(plan: Plan, request: Request) -> None:
    """Raise unless a plan that was given has room for the states of so many groups.

    Raises:
        InputError: it has room for fewer, or for none.
    """
    has_states = any(stage.state_bytes for stage in plan.stages)
    if request.states and not has_states:
        raise InputError(
            f"states={request.states}, and the plan that was given has no room for states: make "
            "one by penstock plan --inference --states, or ps.profile(..., states=)"
        )
    if request.in_flight is not None and has_states and request.in_flight > plan.groups:
        raise InputError(
            f"in_flight={request.in_flight}, and the plan that was given has room for the states "
            f"of {plan.groups} groups: make one by penstock plan --inference --in-flight "
            f"{request.in_flight}, or have at most {plan.groups} under way"
        )


@dataclass(frozen=True)
class Replanning:
    """What another plan of a running pipeline is made from. The number of micro-batches stays.

    Attributes:
        plan: that is in use.
        program: what is run.
        args, kwargs: of the example batch, as of `plan_for`.
        backend: the workers that are to run the new plan, with which links are measured.
        request: what was asked of the plan in use, which is asked of the new one as well.
        progress: as in `Pipeline`.
    """

    plan: Plan
    program: Program
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    backend: Backend
    request: Request
    progress: Progress | None

    @property
    def same(self) -> Request:
        """The request, for the same number of micro-batches."""
        return replace(self.request, num_microbatches=self.plan.num_microbatches)

    def costs(self, fresh: bool) -> list[Profile]:
        """Profiles for the workers, with as many intra-op threads as they have.

        Args:
            fresh: whether to profile even if the same was profiled before.

        Raises:
            PlanError: no plan of these workers is possible.
        """
        backend = self.backend
        backend.wait(self.progress)
        return profiles_for(
            self.program,
            self.args,
            self.kwargs,
            choices=backend.choices,
            request=self.same,
            limits=limits_of(backend),
            seconds=PROMPT,
            fresh=fresh,
            threads=backend.threads,
            where=backend.probe,
            progress=self.progress,
        )


def better_plan(of: Replanning) -> Planned:
    """A plan on the same devices that a new profile predicts to be faster.

    If there is none, this is the plan in use, with the new profile's predictions where it has any.
    """
    plan, same, costs = of.plan, of.same, of.costs(fresh=True)
    best = plans_on_any(costs, same, limits=limits_of(of.backend))[0]
    if best.layout == plan.layout:
        return _planned(best, costs)._replace(stays=True)
    now, seconds = _now(of, best, costs)
    if best.predicted_step_seconds < _WORTH * seconds:
        return _planned(best, costs)
    if now is None or now.layout != plan.layout:
        return Planned(plan, None, stays=True)
    also = replace_fields(
        now, considered=best.considered, data_parallel_seconds=best.data_parallel_seconds
    )
    return _planned(also, costs)._replace(stays=True)


def plan_on_others(of: Replanning) -> Planned:
    """The best plan on other devices.

    Raises:
        PlanError: there is none.
        InputError: these workers cannot be so many replicas.
    """
    if of.request.replicas != "auto":
        of.backend.check_replicas(of.request.replicas)
    costs = of.costs(fresh=False)
    return _planned(plans_on_any(costs, of.same, limits=limits_of(of.backend))[0], costs)


def _planned(plan: Plan, costs: Sequence[Profile]) -> Planned:
    """A plan, with its own of these profiles."""
    return Planned(plan, profile_of(plan, costs))


def profile_of(plan: Plan, costs: Sequence[Profile]) -> Profile:
    """The one of these profiles that was measured for a plan's workers and their threads.

    For one worker of several that is a part of theirs.
    """
    same = [own for own in costs if own.threads in (plan.threads, 0)] or costs
    fitting = [own for own in same if len(own.devices) == len(plan.devices)]
    if not fitting and len(plan.devices) == 1:
        fitting = [own.alone(plan.devices[0]) for own in same if plan.devices[0] in own.devices]
    return (fitting or same)[0]


def _now(of: Replanning, best: Plan, costs: Sequence[Profile]) -> tuple[Plan | None, float]:
    """What new profiles predict of the plan in use.

    Args:
        of: the plan, and what was asked of it.
        best: the best one by these profiles.
        costs: the profiles.

    Returns:
        the plan that is found for the same cuts and replicas, whose layout may still differ from
        that of the plan in use, or `None` for one device; and the predicted seconds of a step.
    """
    plan, limits = of.plan, limits_of(of.backend)
    if len(plan.devices) == 1:
        return None, best.one_device_seconds or best.predicted_step_seconds
    as_it_is = replace(
        of.same,
        schedule=plan.schedule if len(plan.stages) > 1 and not plan.inference else "auto",
        cuts=plan.cuts or None,
        stages_per_worker="auto",
        replicas=plan.replicas,
    )
    found = plans_on_any(costs, as_it_is, limits=limits)[0]
    return found, found.predicted_step_seconds


def limits_of(backend: Backend) -> Limits:
    """What these workers allow, where the kind of plan may be chosen, and what they need."""
    why = backend.why_one_replica
    try:
        backend.check_replicas(len(backend.devices))
    except InputError:
        why = "There is one replica, as these workers cannot be several."
    return Limits(
        one_replica=why,
        all_devices=backend.all_devices,
        in_one_memory=backend.in_one_memory,
        in_one_process=backend.in_one_memory,
        copies_gradients=backend.copies_gradients,
    )


def plan_for(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    choices: Sequence[Sequence[torch.device]],
    request: Request,
    limits: Limits | None = None,
    tune: bool = False,
    seconds: float = SECONDS,
    fresh: bool = False,
    threads: int = 0,
    where: LinkProbe | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Profile the program, and plan for the devices of one of several lists.

    Args:
        program: what to run.
        args: positional arguments of a batch; the captured example if neither is given.
        kwargs: keyword arguments of a batch.
        choices: the lists of devices; one device for each worker; they exist.
        request: what is asked of the plan.
        limits: what the workers allow where the kind of plan may be chosen; anything by default.
        tune: whether the best few plans are measured, and the fastest is kept.
        seconds: about how long to measure; a profile that was measured for `SECONDS` does as well.
        fresh: whether to profile even if the same was profiled before.
        threads: intra-op threads of each CPU worker; 0 for its share of the cores, or 1 if there is
            one worker, and more are hardly faster.
        where: the workers with which links are measured; threads by default.
        progress: as in `Pipeline`.

    Raises:
        PlanError: the program cannot be cut so.
        InputError: more micro-batches than rows.
    """
    costs = profiles_of_choices(
        program,
        args,
        kwargs,
        choices=choices,
        request=request,
        limits=limits,
        seconds=seconds,
        fresh=fresh,
        threads=threads,
        where=where,
        progress=progress,
    )
    if not tune:
        return _planned(plans_on_any(costs, request, limits=limits)[0], costs)
    few = plans_on_any(costs, request, TUNED, limits)
    return _planned(tuned(program, args, kwargs, few, progress=progress)[0][1], costs)


def profiles_of_choices(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    choices: Sequence[Sequence[torch.device]],
    request: Request,
    limits: Limits | None = None,
    seconds: float = SECONDS,
    fresh: bool = False,
    threads: int = 0,
    where: LinkProbe | None = None,
    progress: Progress | None = None,
) -> list[Profile]:
    """The profiles among which a plan is chosen.

    If steps are short, there is one of a single worker with one thread, too, unless the number is
    given. It is measured in turns with that of one worker with all threads, which replaces the
    earlier one, as the machine may be slower or faster by then. The arguments are those of
    `plan_for`.

    Raises:
        PlanError: what is asked for is not possible on any of the lists.
        InputError: more micro-batches than rows.
    """
    shared: dict[str, Any] = {
        "request": request,
        "limits": limits,
        "fresh": fresh,
        "where": where,
        "progress": progress,
    }
    costs = profiles_for(
        program, args, kwargs, choices=choices, seconds=seconds, threads=threads, **shared
    )
    cpu = [torch.device("cpu")]
    most = threads_per_worker(cpu) if cpu in choices and not threads else 1
    if len(choices) < 2 or most < 2 or request.inference:
        return costs
    best = plans_on_any(costs, request, limits=limits)[0]
    if best.predicted_step_seconds >= SHORT:
        return costs
    pair = profiles_for(
        *(program, args, kwargs),
        choices=[cpu, cpu],
        seconds=_SHARE * seconds,
        threads=[most, 1],
        **shared,
    )
    return [*pair, *(own for own in costs if len(own.devices) > 1)]


def profiles_for(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    choices: Sequence[Sequence[torch.device]],
    request: Request,
    limits: Limits | None = None,
    seconds: float = SECONDS,
    fresh: bool = False,
    threads: int | Sequence[int] = 0,
    where: LinkProbe | None = None,
    progress: Progress | None = None,
) -> list[Profile]:
    """A profile for each of the lists of devices on which what is asked for is possible.

    Several are measured in turns, together `TOGETHER` times as long as one. The arguments are those
    of `plan_for`; `threads` may be one number for each list.

    Raises:
        PlanError: there is none.
        InputError: more micro-batches than rows.
    """
    given = [threads] * len(choices) if isinstance(threads, int) else threads
    possible: list[Sequence[torch.device]] = []
    settings: list[tuple[list[str], int]] = []
    errors: list[PlanError] = []
    for devices, count in zip(choices, given, strict=True):
        try:
            check_possible(program, request, limits or Limits(), len(devices), len(choices) > 1)
            possible.append(devices)
            settings.append((list(map(str, devices)), count or threads_per_worker(devices)))
        except PlanError as error:
            errors.append(error)
    if not possible:
        raise errors[0]
    each = 1.0 if len(possible) == 1 else TOGETHER / len(possible)
    costs, _ = cached_profiles(
        program,
        args,
        kwargs,
        choices=settings,
        num_microbatches=request.num_microbatches,
        seconds=each * seconds,
        longer=each * SECONDS,
        inference=request.inference,
        progress=progress,
        fresh=fresh,
    )
    costs = [with_states(own, program, request.states) for own in costs]
    if request.boundary_dtype is not None:
        dtype: torch.dtype = getattr(torch, request.boundary_dtype)
        travelling = bytes_across(program, dtype, request.inference, request.states)
        tied = weights_across(program, dtype)
        costs = [replace_fields(own, travelling=travelling, tied=tied) for own in costs]
    measured_with = where or ThreadProbe()
    pairs = zip(costs, possible, strict=True)
    return [with_overheads(own, devices, measured_with, fresh=fresh) for own, devices in pairs]


def check_possible(
    program: Program, request: Request, limits: Limits, devices: int, all_devices: bool = False
) -> None:
    """Raise, before anything is measured, if no plan can be as it is asked for.

    Args:
        program, request, limits: as of `plan_for`.
        devices: how many there are.
        all_devices: whether every device has to be used, whatever the limits are.

    Raises:
        PlanError: there are not enough places for stages; or cuts or modules that are asked for are
            not possible.
    """
    labels, reasons = program.labels, program.cuts.reasons
    request.recomputed(labels, reasons)
    errors: list[PlanError] = []
    only_one = bool(limits.one_replica or why_one_replica(program))
    for replicas in request.replica_numbers(devices, only_one):
        each = devices // replicas or 1
        try:
            program.check_stages(each)
            request.positions(labels, reasons, each)
            return
        except PlanError as error:
            errors.append(error)
    is_free = request.replicas == "auto" and not request.asks_for_stages
    if not is_free or all_devices or limits.all_devices:
        raise errors[0]


def tuned(
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    candidates: Sequence[Plan],
    *,
    progress: Progress | None = None,
) -> list[tuple[float, Plan]]:
    """The median seconds of a step, or from batch to batch in a flow, by every one of these plans.

    The fastest comes first.

    Args:
        candidates: what is measured, in turns, on a copy of the model.
        program, args, kwargs, progress: as of `plan_for`.

    Raises:
        PlanError: the model has no weights, so that it cannot be run.
    """
    leaves = program.flatten_inputs(args, kwargs or {}) if args or kwargs else program.example
    steps = measured(program, leaves, candidates, progress=progress)
    medians = [statistics.median(seconds) for seconds in steps]
    return sorted(zip(medians, candidates, strict=True), key=lambda pair: pair[0])
