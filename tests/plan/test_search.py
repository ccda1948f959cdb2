"""The search on profiles of all shapes: a whole plan, as asked, never below the bound."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.plan.candidates import PREFERENCE
from penstock.schedule import SCHEDULES
from tests.plan.test_plan import profile, scaled

COSTS = st.lists(st.floats(0.01, 10.0), min_size=3, max_size=9)


@settings(max_examples=25)
@given(COSTS, st.integers(1, 3), st.integers(1, 12))
def test_every_plan_is_whole(costs: list[float], devices: int, batch: int) -> None:
    plan = ps.plan(profile(costs, devices, batch), replicas=1)
    split = [option for option in plan.considered if not option.only_compared]
    best = min(option.predicted_step_seconds or 0.0 for option in split)
    assert plan.predicted_step_seconds <= best * 1.002
    assert plan.bound_seconds <= plan.predicted_step_seconds * (1 + 1e-9)
    assert 1 <= plan.num_microbatches <= batch
    edges = [0, *plan.cuts, len(costs)]
    assert [stage.calls for stage in plan.stages] == list(pairwise(edges))
    assert all(start < stop for start, stop in (stage.calls for stage in plan.stages))
    assert sum(stage.weight_bytes for stage in plan.stages) == 4 * len(costs)
    assert [(stage.first, stage.last) for stage in plan.stages] == [
        (f"call{start}", f"call{stop - 1}") for start, stop in (s.calls for s in plan.stages)
    ]


@settings(max_examples=25)
@given(COSTS, st.sets(st.integers(1, 8)))
def test_forbidden_cuts_are_never_chosen(costs: list[float], cuts: set[int]) -> None:
    forbidden = {k: "no" for k in cuts if k < len(costs)}
    found = profile(costs, forbidden=forbidden)
    if len(forbidden) == len(costs) - 1:
        with pytest.raises(ps.PlanError):
            ps.plan(found, replicas=1)
    else:
        assert not set(ps.plan(found, replicas=1).cuts) & set(forbidden)


def test_a_forbidden_cut_that_is_asked_for_is_refused() -> None:
    with pytest.raises(ps.PlanError, match="before call 2: because"):
        ps.plan(profile([1.0] * 4, forbidden={2: "because"}), cuts=(2,), replicas=1)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("count", [1, 4, 7, 16])
def test_what_is_asked_for_is_what_is_planned(schedule: str, count: int) -> None:
    plan = ps.plan(profile([1, 2, 3, 4]), num_microbatches=count, schedule=schedule, replicas=1)
    assert (plan.schedule, plan.num_microbatches) == (schedule, count)
    assert [o.schedule for o in plan.considered if o.way == "pipeline"] == [schedule]


def test_a_slow_device_gets_less() -> None:
    costs = profile([1.0] * 8)
    fast = costs.on("cpu")
    double = tuple(tuple(3 * x for x in line) for line in fast.forward)
    slow = msgspec.structs.replace(
        fast, kind="slow", forward=double, backward=tuple(tuple(2 * x for x in d) for d in double)
    )
    mixed = msgspec.structs.replace(
        costs, devices=("cpu", "slow"), kinds={"cpu": fast, "slow": slow}
    )
    assert ps.plan(costs, num_microbatches=16, schedule="1f1b", replicas=1).cuts == (4,)
    assert ps.plan(mixed, num_microbatches=16, schedule="1f1b", replicas=1).cuts == (6,)


@pytest.mark.parametrize("count", [0, -1, 17])
def test_counts_that_do_not_fit_the_batch(count: int) -> None:
    with pytest.raises(ps.InputError, match=f"num_microbatches={count}.*choose between 1 and 16"):
        ps.plan(profile([1.0, 1.0]), num_microbatches=count, replicas=1)


def test_an_unknown_schedule() -> None:
    with pytest.raises(ps.InputError, match=r"schedule='2f2b' is unknown; choose .*1f1b"):
        ps.plan(profile([1.0, 1.0]), schedule="2f2b", replicas=1)


def test_more_stages_than_there_are_places_for() -> None:
    few = profile([1.0] * 4, forbidden={2: "because"})
    said = "stages_per_worker=2 with 2 workers makes more stages than the 3 that"
    for schedule in ("auto", "fitted"):
        with pytest.raises(ps.PlanError, match=said):
            ps.plan(few, stages_per_worker=2, schedule=schedule, replicas=1)


def test_more_devices_than_calls() -> None:
    with pytest.raises(ps.PlanError, match="3"):
        ps.plan(profile([1.0, 1.0], devices=3), replicas=1)


@settings(max_examples=25)
@given(COSTS, st.integers(1, 12))
def test_no_cut_is_better_a_call_away(costs: list[float], count: int) -> None:
    """The partition alone leaves some: it counts forward and backward together."""
    found = profile(costs, devices=2)
    plan = ps.plan(found, num_microbatches=count, schedule="1f1b", replicas=1)
    for cut in (plan.cuts[0] - 1, plan.cuts[0] + 1):
        if 0 < cut < len(costs):
            other = ps.plan(found, num_microbatches=count, schedule="1f1b", cuts=(cut,), replicas=1)
            assert plan.predicted_step_seconds <= other.predicted_step_seconds


def test_many_devices_are_put_into_the_order_that_suits() -> None:
    """One heavy call at the end wants the fast device, which is given first."""
    costs = profile([1.0] * 6 + [4.0], devices=4)
    fast = costs.on("cpu")
    quick = scaled(fast, 1 / 4, "fast")
    mixed = msgspec.structs.replace(
        costs, devices=("fast", "cpu", "cpu", "cpu"), kinds={"cpu": fast, "fast": quick}
    )
    given = ps.plan(mixed, schedule="1f1b", num_microbatches=8, replicas=1)
    free = ps.plan(mixed, schedule="1f1b", num_microbatches=8, any_order=True, replicas=1)
    assert free.devices == ("cpu", "cpu", "cpu", "fast")
    assert free.predicted_step_seconds < given.predicted_step_seconds


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_fitted_schedule_takes_any_number_of_stages(devices: int) -> None:
    costs = profile([1.0, 3.0, 2.0, 1.0, 2.0], devices)
    plan = ps.plan(costs, schedule="fitted", num_microbatches=4, cuts=(1, 2, 3), replicas=1)
    assert plan.cuts == (1, 2, 3)
    assert len(plan.devices) == devices
    several = ps.plan(costs, schedule="fitted", num_microbatches=4, replicas=1)
    assert several.predicted_step_seconds <= ps.plan(
        costs, schedule="eager-1f1b", num_microbatches=4, replicas=1
    ).predicted_step_seconds * (1 + 1e-9)


def test_the_planner_knows_all_schedules() -> None:
    assert set(PREFERENCE) == set(SCHEDULES)
