"""What if: against formulas on equal calls, and what is said where there is no answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.plan import Plan
from penstock.plan.layout import Memory
from penstock.plan.whatif import WhatIf, what_if, what_if_planned
from penstock.profile.data import Link
from penstock.schedule import SCHEDULES
from tests.plan.test_plan import profile

CALLS = 64
SECONDS = 3 * 1.1  # a call's forward and backward, at one row


def equal(**changes: Any) -> ps.Profile:
    """Calls that are all alike, and links that cost nothing."""
    return profile([1.0] * CALLS, **changes)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_what_the_formula_says(workers: int, schedule: str) -> None:
    found = what_if(equal(), WhatIf(workers=workers, num_microbatches=16, schedule=schedule))
    stage = SECONDS * CALLS / workers
    assert found.step_seconds == pytest.approx((16 + workers - 1) * stage)
    assert found.efficiency == pytest.approx(16 / (16 + workers - 1))
    assert found.samples_per_second == pytest.approx(16 / ((16 + workers - 1) * stage))
    assert (found.replicas, found.stages, found.batch_size) == (1, workers, 16)
    assert found.bound_seconds <= found.step_seconds * (1 + 1e-9)


def test_speed_and_links() -> None:
    case = WhatIf(workers=2, num_microbatches=1, speed=10.0, latency=0.5, bandwidth=16.0)
    found = what_if(equal(), case)
    # Eight bytes a row cross the cut, there and back.
    assert found.step_seconds == pytest.approx(SECONDS * CALLS / 10 + 2 * (0.5 + 8 / 16))


def test_links_are_as_measured_unless_given() -> None:
    costs = equal(links={"cpu>cpu": Link(latency_seconds=1.0, bytes_per_second=4.0)})
    case = WhatIf(workers=2, num_microbatches=1)
    assert what_if(costs, case).step_seconds == pytest.approx(SECONDS * CALLS + 2 * (1 + 8 / 4))
    faster = WhatIf(workers=2, num_microbatches=1, latency=0.0)
    assert what_if(costs, faster).step_seconds == pytest.approx(SECONDS * CALLS + 2 * 8 / 4)


def test_more_workers_than_stages_are_replicas() -> None:
    case = WhatIf(workers=256, num_microbatches=16, bandwidth=4.0, latency=0.25)
    found = what_if(equal(), case)
    assert (found.replicas, found.stages, found.batch_size) == (4, 64, 64)
    hops = 2 * 4 - 3  # of the last bucket, which is the only one
    assert found.reduce_seconds == pytest.approx(2 * 4 / 4.0 + hops * (4 / 4.0 + 0.25))
    assert "replicas, as the program has places for 64 stages" in found.note
    one = what_if(equal(), replace(case, workers=64))
    assert one.note == ""
    assert one.step_seconds is not None
    assert found.step_seconds is not None
    assert found.step_seconds == pytest.approx(one.step_seconds + found.reduce_seconds)
    slower = found.step_seconds / one.step_seconds
    assert found.efficiency == pytest.approx((one.efficiency or 0.0) / slower)


def test_replicas_and_stages_as_asked() -> None:
    found = what_if(equal(), WhatIf(workers=8, num_microbatches=4, replicas=4))
    assert (found.replicas, found.stages) == (4, 2)
    case = WhatIf(workers=8, num_microbatches=8, schedule="interleaved", stages_per_worker=4)
    assert what_if(equal(), case).stages == 32
    with pytest.raises(ps.InputError, match=r"8 workers .* 3 replicas; give one of 1, 2, 4, 8"):
        WhatIf(workers=8, num_microbatches=4, replicas=3)
    with pytest.raises(ps.PlanError, match=r"128 stages .* 64 .* give 2 or more replicas"):
        what_if(equal(), WhatIf(workers=128, num_microbatches=4, replicas=1))


def test_the_batch_is_shared_out() -> None:
    found = what_if(equal(), WhatIf(workers=4, num_microbatches=4, replicas=2, batch=20))
    assert found.batch_size == 20
    whole = what_if(equal(), WhatIf(workers=2, num_microbatches=4, batch=10))
    assert found.reduce_seconds > 0
    assert whole.step_seconds == pytest.approx((found.step_seconds or 0) - found.reduce_seconds)
    with pytest.raises(ps.InputError, match="2 replicas 3 rows, fewer than its 4 micro-batches"):
        what_if(equal(), WhatIf(workers=4, num_microbatches=4, replicas=2, batch=6))


def test_memory() -> None:
    costs = equal(saved=(10.0,) * CALLS)
    held = {
        name: what_if(costs, WhatIf(workers=4, num_microbatches=16, schedule=name)).memory_bytes
        for name in ("gpipe", "1f1b")
    }
    weights = 16 * 4 * 4  # of a quarter of the calls, with gradients and optimizer state
    assert held["gpipe"] == weights + 16 * (16 * 10 + 8)
    assert held["1f1b"] == weights + 4 * (16 * 10 + 8)
    small = Memory(limit=1000)
    case = WhatIf(workers=4, num_microbatches=16, schedule="gpipe", memory=small, recompute="none")
    found = what_if(costs, case)
    assert found.step_seconds is None
    assert found.efficiency is None
    assert found.samples_per_second is None
    assert "does not fit the memory by" in found.note
    thrifty = what_if(costs, replace(case, recompute="auto"))
    assert thrifty.step_seconds is not None
    assert thrifty.memory_bytes <= 1000


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    found = what_if(equal(), WhatIf(workers=4, num_microbatches=8, schedule=schedule))
    assert found.step_seconds is not None
    assert found.bound_seconds <= found.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"workers": 0}, "workers=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"speed": 0.0}, "20 times as fast"),
        ({"schedule": "best"}, "choose naive, gpipe"),
    ],
)
def test_what_means_nothing(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        WhatIf(**{"workers": 2, "num_microbatches": 2, **wrong})


# -- the plan alone -----------------------------------------------------------------------


def planned(schedule: str = "1f1b") -> Plan:
    return ps.plan(profile([1, 2, 3, 4]), num_microbatches=4, schedule=schedule, replicas=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_on_its_own_machines_takes_what_it_predicted(schedule: str) -> None:
    plan = planned(schedule)
    case = WhatIf(workers=2, num_microbatches=4, microbatch_size=4, schedule=plan.schedule)
    found = what_if_planned(plan, case)
    assert found.step_seconds == pytest.approx(plan.predicted_step_seconds)
    assert found.memory_bytes == max(plan_memory(plan))
    double = what_if_planned(plan, replace(case, speed=2.0))
    assert double.step_seconds == pytest.approx(plan.predicted_step_seconds / 2)


def plan_memory(plan: Plan) -> list[int]:
    held = [0] * len(plan.devices)
    for stage in plan.stages:
        held[stage.worker] += stage.memory_bytes
    return held


def test_a_plan_with_other_links_micro_batches_and_schedules() -> None:
    plan = planned()
    case = WhatIf(workers=2, num_microbatches=1, microbatch_size=4, latency=0.5, bandwidth=16.0)
    one = sum(stage.seconds for stage in plan.stages)
    found = what_if_planned(plan, case)
    assert found.step_seconds == pytest.approx(one + 2 * (0.5 + 4 * 8 / 16))
    gpipe = replace(case, schedule="gpipe", num_microbatches=8)
    slower = what_if_planned(plan, gpipe)
    assert slower.batch_size == 32
    costs = msgspec.structs.replace(plan, schedule="gpipe").costs
    assert slower.step_seconds is not None
    assert slower.step_seconds >= 8 * max(costs.forward) + 8 * max(costs.backward)
    short = what_if_planned(plan, replace(gpipe, memory=Memory(limit=10)))
    assert short.step_seconds is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 4}, "the plan is for 2 workers, and for 4 "),
        ({"microbatch_size": 2}, "the plan is for 4 rows in a micro-batch, and for 2"),
        ({"batch": 32}, "16 rows in a batch"),
        ({"replicas": 2}, "1 replicas"),
        ({"schedule": "zero-bubble-v"}, "2 stages, and for 4"),
    ],
)
def test_what_a_plan_alone_does_not_know(changes: dict[str, Any], words: str) -> None:
    case = WhatIf(**{"workers": 2, "num_microbatches": 4, "microbatch_size": 4, **changes})
    with pytest.raises(ps.PlanError, match=f"{words}.* give the profile"):
        what_if_planned(planned(), case)


def test_replicas_add_gradients_in_order_as_in_a_plan() -> None:
    costs = msgspec.structs.replace(equal(), adding_seconds=1e-3)
    costs = msgspec.structs.replace(costs, parameters=(5,) * costs.num_calls)
    case = WhatIf(workers=2, num_microbatches=4, replicas=2)
    free, found = what_if(equal(), case), what_if(costs, case)
    assert free.step_seconds is not None
    more = 4 * 5e-3 * costs.num_calls  # in the backward of every micro-batch
    assert found.step_seconds == pytest.approx(free.step_seconds + more)
    assert found.one_worker_seconds == free.one_worker_seconds


def test_a_plan_of_replicas_needs_its_profile() -> None:
    replicated = ps.plan(msgspec.structs.replace(equal(), batch_size=4), replicas=2)
    case = WhatIf(workers=2, num_microbatches=2, replicas=2)
    with pytest.raises(ps.PlanError, match=r"2 replicas, .* give the profile"):
        what_if_planned(replicated, case)


def test_a_plan_alone_has_the_rows_that_it_was_made_for() -> None:
    """With other micro-batches of the same batch they have other rows, which takes a profile."""
    case = WhatIf(workers=2, num_microbatches=8, microbatch_size=4, batch=16, schedule="1f1b")
    with pytest.raises(ps.PlanError, match="4 rows in a micro-batch, and for 2"):
        what_if_planned(planned(), case)
