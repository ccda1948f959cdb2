"""From a captured program to a plan: everything checked first, then measured, then chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.capture import Program
from penstock.plan import Plan, plan
from penstock.plan.asked import Cut, positions
from penstock.plan.search import check_schedule
from penstock.profile.measure import Progress, profile
from penstock.workers.devices import threads_per_worker


def plan_for(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[torch.device],
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    cuts: Sequence[Cut] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Profile the program on these devices, and plan for them.

    Args:
        program: what to run.
        args: positional arguments of a batch; the captured example if neither is given.
        kwargs: keyword arguments of a batch.
        devices: one for each stage; they exist.
        num_microbatches: as in `Pipeline`.
        schedule: as in `Pipeline`.
        cuts: as in `Pipeline`.
        progress: as in `Pipeline`.

    Raises:
        PlanError: the program cannot be cut so.
        InputError: an unknown schedule, or more micro-batches than rows.
    """
    check_schedule(schedule)
    program.check_stages(len(devices))
    if cuts is not None:
        cuts = positions(program.labels, program.cuts.reasons, len(devices), cuts)
    names = [str(device) for device in devices]
    costs = profile(
        program,
        args,
        kwargs,
        devices=names,
        num_microbatches=num_microbatches,
        threads=threads_per_worker(devices),
        progress=progress,
    )
    return plan(costs, num_microbatches=num_microbatches, schedule=schedule, cuts=cuts)
