"""Plans for which nothing is measured, where it does not matter how good they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

import penstock as ps
from penstock.profile import DeviceProfile


def uniform_plan(
    program: ps.Program,
    workers: int,
    microbatches: int,
    schedule: str = "1f1b",
    cuts: Sequence[int | str] | None = None,
    recompute: str | Sequence[str] = "auto",
) -> ps.Plan:
    """A plan of stages for which nothing is measured: every call is taken to cost the same.

    Args:
        program: what is planned; the batch size is that of its example.
        workers: the number of CPU workers.
        microbatches: how many.
        schedule: its name.
        cuts: as of `penstock.plan`; `None` lets the planner choose.
        recompute: as of `penstock.plan`.
    """
    calls = len(program)
    forward, backward = ((1.0,) * calls,), ((2.0,) * calls,)
    kind = DeviceProfile(kind="cpu", rows=(1,), forward=forward, backward=backward, spread=0.0)
    reasons = {k: program.cuts.forbidden(k) for k in range(1, calls)}
    profile = ps.Profile(
        fingerprint=program.fingerprint,
        batch_size=program.example_sizes["B"],
        devices=("cpu",) * workers,
        kinds={"cpu": kind},
        labels=tuple(call.label for call in program.train.calls),
        weights=(0,) * calls,
        boundary=(0.0,) * (calls + 1),
        forbidden={k: reason for k, reason in reasons.items() if reason},
        saved=(1.0,) * calls,
    )
    return ps.plan(
        profile,
        num_microbatches=microbatches,
        schedule=schedule,
        cuts=cuts,
        recompute=recompute,
        replicas=1,
    )


def replicated_plan(program: ps.Program, replicas: int) -> ps.Plan:
    """A plan of replicas of the whole model, each on a CPU worker with one micro-batch."""
    return replicated(uniform_plan(program, 1, replicas, recompute="none"), replicas)


def replicated(plan: ps.Plan, replicas: int, shares: tuple[int, ...] = ()) -> ps.Plan:
    """A plan with replicas of the stages of another plan, which share its micro-batches.

    Args:
        plan: of one replica.
        replicas: how many there are in all.
        shares: the number of micro-batches of each replica; empty for equally many.
    """
    others = (plan.devices,) * (replicas - 1)
    return msgspec.structs.replace(plan, other_replicas=others, shares=shares)
