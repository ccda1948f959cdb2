"""What a pass takes besides its actions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import penstock as ps
from penstock.plan.request import Request
from penstock.plan.whatif import WhatIf, what_if_planned
from penstock.planning import overheads, planner
from penstock.planning.pass_overhead import flow_overhead, pass_overhead
from tests.plan.test_replicated import profile
from tests.support.models import mlp
from tests.support.threads import NewThreads

X = torch.randn(8, 8)


@pytest.mark.parametrize("overhead", [pass_overhead, flow_overhead])
def test_it_is_measured_once_and_leaves_nothing_behind(
    new_threads: NewThreads, overhead: Any
) -> None:
    overhead.cache_clear()
    state = torch.random.get_rng_state()
    first = overhead(2)
    assert first > 0
    assert overhead(2) == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert new_threads() == []


def test_whatever_the_defaults_of_the_script_are() -> None:
    pass_overhead.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert pass_overhead(1) > 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("replicas", ["auto", 1, 2])
def test_all_that_is_predicted_takes_as_much_longer(replicas: object) -> None:
    less = profile(2)
    more = msgspec.structs.replace(less, pass_seconds=0.25)
    found = [ps.plan(costs, replicas=replicas) for costs in (less, more)]  # type: ignore[arg-type]
    before, after = found
    assert (before.cuts, before.replicas) == (after.cuts, after.replicas)
    assert after.pass_seconds == 0.25
    assert after.predicted_step_seconds == pytest.approx(before.predicted_step_seconds + 0.25)
    assert after.one_device_seconds == pytest.approx((before.one_device_seconds or 0.0) + 0.25)
    parallel = (before.data_parallel_seconds or 0.0) + 0.25
    assert after.data_parallel_seconds == pytest.approx(parallel)
    assert after.bound_seconds == before.bound_seconds
    if replicas == 1:
        case = WhatIf(
            workers=2,
            num_microbatches=after.num_microbatches,
            microbatch_size=after.microbatch_size,
            schedule=after.schedule,
            stages_per_worker=len(after.stages) // 2,
        )
        told = what_if_planned(after, case).step_seconds
        assert told == pytest.approx(after.predicted_step_seconds)


def test_it_is_part_of_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "pass_overhead", lambda workers: 100.0 * workers)
    program = ps.capture(mlp(8, 8, 8), (X,))
    devices = [torch.device("cpu")] * 2
    chosen = planner.plan_for(program, choices=[devices], request=Request(replicas=2), seconds=0.1)
    plan = chosen.plan
    assert plan.pass_seconds == 200.0
    assert 200.0 < plan.predicted_step_seconds < 201.0
