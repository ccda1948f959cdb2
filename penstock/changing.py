"""Changing the workers of a pipeline between two steps: options, checks and plans.

`Pipeline.replan` and `Pipeline.resize` are one mechanism. Both keep the number of micro-batches and
the intra-op threads, on which bits depend, and differ in the devices and in how a plan is found.
The old workers are kept until the new plan has been made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as replace_fields

from penstock.audit.pace import Setting
from penstock.devices.choice import Devices
from penstock.engine.batchnorm import BatchNormMode
from penstock.engine.compiled import Compile
from penstock.engine.microbatch import Merge
from penstock.errors import BY_USER, InputError, PlanError, closed
from penstock.plan import Plan
from penstock.plan.decisions import StagePlan
from penstock.plan.request import Request
from penstock.plan.search import plans_on_any
from penstock.planning.planner import Planned, Replanning, limits_of, plan_on_others
from penstock.profile import Profile
from penstock.runner import Runner
from penstock.weights import Weights
from penstock.workers.backend import Workers
from penstock.workers.kinds import WorkerOptions
from penstock.workers.memories import SideEffects

Planning = Callable[[Replanning], Planned]
"""Finds a plan, which may be that in use; see `better_plan`, which is one."""


@dataclass(frozen=True)
class Given:
    """The options of a pipeline that are needed once more for another plan.

    Attributes:
        request: the options of planning.
        workers: the options of the workers.
        example: the example arguments, positional and keyword.
        weights: the source of parameters on `meta`; `None` once they have been loaded.
        batchnorm, merge, audit: as in `Pipeline`.
        compile: arguments of `torch.compile`, if stages are compiled.
        graphs: whether stages are run as CUDA graphs where they can.
    """

    request: Request
    workers: WorkerOptions
    example: tuple[Sequence[Any], Mapping[str, Any] | None]
    weights: Weights | None
    batchnorm: BatchNormMode
    merge: Merge
    audit: Setting
    compile: Compile | None = None
    graphs: bool = False

    def on(self, devices: Devices, now: Workers, threads: int) -> WorkerOptions:
        """The same workers on these devices; those on CPUs with as many threads as now.

        Args:
            devices: of the workers.
            now: the present ones.
            threads: what each of them has, if it is on a CPU.
        """
        has_cpu = any(device.type == "cpu" for device in now.devices)
        return replace(self.workers, devices=devices, threads=threads if has_cpu else 0)

    def as_they_are(self, now: Workers, threads: int) -> WorkerOptions:
        """The present workers and no others; `now` and `threads` as of `on`."""
        return self.on([str(device) for device in now.devices], now, threads)


def with_choices_of(plan: Plan, request: Request) -> Request:
    """The request, completed by what the plan in use says, so that the next plan is like it.

    Bits depend on the dtype in which values cross from stage to stage, and under autocast on what
    is recomputed; what workers may hold depends on the limit, and on what is recomputed.

    Args:
        plan: the plan in use, whether it was given or made.
        request: the other options of `Pipeline` for planning.
    """
    recomputed = request.recompute
    if recomputed == "auto" and all(_is_recomputed(stage) for stage in plan.stages):
        pieces = max(len(stage.recompute) for stage in plan.stages)
        recomputed = "all" if pieces == 1 else "boundaries"
    limit = plan.memory_limit if request.memory_limit is None else request.memory_limit
    dtype = request.boundary_dtype or plan.boundary_dtype
    usual = plan.in_flight in (0, len(plan.devices) + 1)
    return replace(
        request,
        recompute=recomputed,
        memory_limit=limit,
        boundary_dtype=dtype,
        inference=plan.inference,
        in_flight=request.in_flight or (None if usual else plan.in_flight),
    )


def _is_recomputed(stage: StagePlan) -> bool:
    return sum(end - first for first, end in stage.recompute) == stage.calls[1] - stage.calls[0]


def with_one_replica(request: Request, plan: Plan, left: SideEffects) -> tuple[Request, str]:
    """The request for the next plan, and why it is limited to one replica; empty if it is not.

    Args:
        request: the options of planning.
        plan: the plan in use.
        left: what forwards have left with its workers.
    """
    if not left.remembers or plan.replicas > 1 or request.replicas == 1:
        return request, ""
    why = (
        f"There is one replica, as {left.remembers} may remember something from micro-batch to "
        "micro-batch, which other processes would not see."
    )
    return replace(request, replicas=1), why


def check_can_change(what: str, runner: Runner, instead: str) -> None:
    """Raise unless the workers can be replaced now.

    Args:
        what: the method that would do it.
        runner: that runs the passes.
        instead: what works under torchrun.

    Raises:
        InputError: results are still with the workers, or they are ranks.
        ClosedError: the pipeline is closed.
    """
    if runner.is_busy:
        raise InputError(
            f"{what} replaces the workers, and results of pipe(x) or map() are still with "
            "them: call backward(), or delete the results, and take all results of map() first"
        )
    if runner.workers.role.name:
        raise InputError(
            f"{what} cannot replace ranks, which torchrun has started: pipe.save(folder), and "
            f"{instead}"
        )
    if not runner.workers.board.close.alive:
        raise closed(BY_USER)


class Fallbacks:
    """Plans for fewer workers, made ahead for one and for two fewer.

    (Jang et al. 2023, Oobleck, arXiv:2309.08125: pipelines are planned for the failures to come.)

    The plans follow the user's request. If none does for a number of workers, what depends on that
    number (replicas, cuts, stages per worker, the schedule) is chosen freely.

    Args:
        of: what plans are made from; the profile of the present workers is used for fewer.

    Raises:
        PlanError: there is no plan for fewer workers.
    """

    def __init__(self, of: Replanning) -> None:
        self._costs = of.costs(fresh=False)[0]
        self._request, self._limits = of.same, limits_of(of.backend)
        self._plans: dict[tuple[int, bool], Plan | None] = {}
        count = len(of.backend.devices)
        found = [self._plan(fewer, False) for fewer in range(max(1, count - 2), count)]
        if count > 1 and not any(found):
            self.best(count - 1, False)

    def best(self, most: int, one_replica: bool) -> Plan:
        """The plan for as many workers as possible.

        Args:
            most: so many are left.
            one_replica: whether there has to be one replica.

        Raises:
            PlanError: there is none.
        """
        found = (self._plan(count, one_replica) for count in range(most, 0, -1))
        best = next((plan for plan in found if plan is not None), None)
        if best is None:
            raise PlanError(
                f'on_failure="continue" needs a plan for fewer workers, and there is none for '
                f"{most} or fewer. Leave out memory_limit= or recompute=, or use "
                'on_failure="replace"'
            )
        return best

    def _plan(self, count: int, one_replica: bool) -> Plan | None:
        key = count, one_replica
        if key not in self._plans:
            costs = replace_fields(self._costs, devices=self._costs.devices[:count])
            self._plans[key] = next(self._found(costs, one_replica), None)
        return self._plans[key]

    def _found(self, costs: Profile, one_replica: bool) -> Iterator[Plan]:
        """The best plan for the request, then the best if what depends on the number is open."""
        asked = self._request
        free = replace(asked, replicas="auto", cuts=None, stages_per_worker="auto", schedule="auto")
        for request in (asked, free):
            wanted = replace(request, replicas=1) if one_replica else request
            with suppress(PlanError, InputError):
                yield plans_on_any([costs], wanted, limits=self._limits)[0]


def plan_for_others(of: Replanning) -> Planned:
    """Like `plan_on_others`, but a `PlanError` names the options that had to be satisfied.

    Raises:
        PlanError: no plan for these devices satisfies the options.
        InputError: these workers cannot have the requested number of replicas.
    """
    try:
        return plan_on_others(of)
    except PlanError as error:
        raise PlanError(
            f"there is no plan for {', '.join(map(str, of.backend.devices))} with "
            f"{_requested(of.plan, of.request)}: {error}. The workers stay as they are; give other "
            "devices, or build the pipeline with fewer options"
        ) from error


def _requested(plan: Plan, request: Request) -> str:
    """What the new plan had to be like, in words."""
    free = Request()
    names = (
        "schedule",
        "cuts",
        "recompute",
        "memory_limit",
        "boundary_dtype",
        "stages_per_worker",
        "replicas",
        "inference",
    )
    asked = {name: getattr(request, name) for name in names}
    differing = [
        f"{name}={value!r}" for name, value in asked.items() if value != getattr(free, name)
    ]
    count = f"{plan.num_microbatches} micro-batches, which stay so that results do"
    return ", ".join([*differing, count])
