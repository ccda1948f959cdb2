"""Plans for which nothing is measured, where the cut and the order are not the question."""

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
    """A plan of stages for which nothing is measured: every call is taken to cost the same."""
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
    """The whole model so many times, each time on a CPU worker, and a micro-batch for each."""
    return replicated(uniform_plan(program, 1, replicas, recompute="none"), replicas)


def replicated(plan: ps.Plan, replicas: int, shares: tuple[int, ...] = ()) -> ps.Plan:
    """The same stages, so many times; each runs as many micro-batches as these, or equally many."""
    others = (plan.devices,) * (replicas - 1)
    return msgspec.structs.replace(plan, other_replicas=others, shares=shares)
