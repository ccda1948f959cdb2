"""From a captured program to a plan: everything checked first, then measured, then chosen."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec.structs import replace as replace_fields

from penstock.capture import Program
from penstock.devices.choice import threads_per_worker
from penstock.display.terminal import Progress
from penstock.errors import InputError
from penstock.plan import Plan, plans
from penstock.plan.plan import advice
from penstock.plan.request import Request
from penstock.planning.tuning import measured
from penstock.profile import Profile
from penstock.profile.cache import cached_profile
from penstock.profile.measure import bytes_across
from penstock.workers.backend import Backend
from penstock.workers.probe import LinkProbe, with_links
from penstock.workers.threads.backend import ThreadProbe

_LOG = logging.getLogger("penstock")

TUNED = 4
"""Plans that are measured when that is asked for."""


def decide_plan(
    plan: Plan | str | os.PathLike[str] | None,
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backend: Backend,
    request: Request,
    tune: bool,
    progress: Progress | None,
) -> Plan:
    """The plan that was given, or that of the file that was named; or a new one, see `plan_for`.

    Where several processes run the script, one of them decides for all.

    Args:
        plan: the plan, or the name of its file.
        program, args, kwargs, request, tune, progress: as of `plan_for`.
        backend: the workers that it is for.

    Raises:
        PlanError: the program cannot be cut as the plan says, or as it was asked for.
        InputError: the file cannot be read, or there are more micro-batches than rows.
    """
    with backend.operation("the planning"):
        made = None
        if backend.leads and plan is not None:
            made = plan if isinstance(plan, Plan) else Plan.load(plan)
            backend.check_replicas(made.replicas)
            if request.boundary_dtype is not None:
                made = replace_fields(made, boundary_dtype=request.boundary_dtype)
        elif backend.leads:
            request = _possible(request, backend)
            backend.wait(progress)  # what workers do to start would be in the profile
            made = plan_for(
                program,
                args,
                kwargs,
                devices=backend.devices,
                request=request,
                tune=tune,
                where=backend.probe,
                progress=progress,
            )
            for sentence in advice(made):
                _LOG.warning(sentence)
        decided = backend.agree(program, made)
    edges = [first for stage in decided.stages for first, _, _ in stage.spans]
    program.check_cuts([edge for edge in edges if edge > 0])
    return decided


def _possible(request: Request, backend: Backend) -> Request:
    """What is asked, with one replica where any number may be chosen and there can be one only.

    Raises:
        InputError: more are asked for.
    """
    if request.replicas != "auto":
        backend.check_replicas(request.replicas)
        return request
    try:
        backend.check_replicas(len(backend.devices))
    except InputError:
        return replace(request, replicas=1)
    return request


def plan_for(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[torch.device],
    request: Request,
    tune: bool = False,
    fresh: bool = False,
    where: LinkProbe | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Profile the program on these devices, and plan for them.

    Args:
        program: what to run.
        args: positional arguments of a batch; the captured example if neither is given.
        kwargs: keyword arguments of a batch.
        devices: one for each worker; they exist.
        request: what is asked of the plan.
        tune: whether the best few plans are measured, and the fastest is kept.
        fresh: whether to profile even if the same was profiled before.
        where: the workers with which links are measured; threads by default.
        progress: as in `Pipeline`.

    Raises:
        PlanError: the program cannot be cut so.
        InputError: more micro-batches than rows.
    """
    costs = profile_for(
        program,
        args,
        kwargs,
        devices=devices,
        request=request,
        fresh=fresh,
        where=where,
        progress=progress,
    )
    if not tune:
        return plans(costs, request)[0]
    best = plans(costs, request, most=TUNED)
    return tuned(program, args, kwargs, best, devices=devices, progress=progress)[0][1]


def tuned(
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    candidates: Sequence[Plan],
    *,
    devices: Sequence[torch.device],
    progress: Progress | None = None,
) -> list[tuple[float, Plan]]:
    """The median seconds of a step by every one of these plans, the fastest first.

    Args:
        candidates: what is measured, in turns, on a copy of the model.
        program, args, kwargs, devices, progress: as of `plan_for`.

    Raises:
        PlanError: the model has no weights, so that it cannot be run.
    """
    leaves = program.flatten_inputs(args, kwargs or {}) if args or kwargs else program.example
    steps = measured(program, leaves, candidates, devices, progress=progress)
    medians = [statistics.median(seconds) for seconds in steps]
    return sorted(zip(medians, candidates, strict=True), key=lambda pair: pair[0])


def profile_for(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[torch.device],
    request: Request,
    fresh: bool = False,
    where: LinkProbe | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What the program costs on these devices, links included; checked against the request first.

    Args:
        program, args, kwargs, devices, request, fresh, where, progress: as of `plan_for`.

    Raises:
        PlanError: the program cannot be cut so.
        InputError: more micro-batches than rows.
    """
    each = len(devices) if request.replicas == "auto" else len(devices) // request.replicas or 1
    if request.replicas != "auto":
        program.check_stages(each)
        request.positions(program.labels, program.cuts.reasons, each)
    request.recomputed(program.labels, program.cuts.reasons)
    costs, _ = cached_profile(
        program,
        args,
        kwargs,
        devices=[str(device) for device in devices],
        num_microbatches=request.num_microbatches,
        threads=threads_per_worker(devices),
        progress=progress,
        fresh=fresh,
    )
    if request.boundary_dtype is not None:
        dtype: torch.dtype = getattr(torch, request.boundary_dtype)
        costs = replace_fields(costs, travelling=bytes_across(program, dtype))
    return with_links(costs, devices, where or ThreadProbe())
