"""Memory: limits are kept, recomputing is the least that keeps them, and errors say what would."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.plan.layout import Layout, Memory, Stretch
from penstock.plan.request import Limits, Request
from penstock.plan.search import plans
from penstock.schedule import SCHEDULES, check
from penstock.simulate import memory_over_time
from tests.plan.test_plan import profile

CALLS = 12


def hungry(devices: int = 2, **changes: Any) -> ps.Profile:
    """Calls that save 1 kB a row, with 10 bytes of weights each; little crosses every third cut."""
    found = profile([1.0 + (k % 5) / 2 for k in range(CALLS)], devices)
    boundary = tuple(50.0 if k % 3 == 0 else 400.0 for k in range(CALLS + 1))
    saved = (1000.0,) * CALLS
    found = msgspec.structs.replace(
        found, saved=saved, weights=(10,) * CALLS, boundary=boundary, outputs=(0.0,) * CALLS
    )
    return msgspec.structs.replace(found, **changes)


def test_without_a_limit_nothing_is_recomputed() -> None:
    assert not any(stage.recompute for stage in ps.plan(hungry(), replicas=1).stages)


def test_a_limit_is_kept_by_recomputing_what_it_takes() -> None:
    free = ps.plan(hungry(), num_microbatches=4, schedule="gpipe", replicas=1)
    peak = max(stage.memory_bytes for stage in free.stages)
    assert peak == pytest.approx(4 * 4 * 6 * 1000, rel=0.2)  # m micro-batches of 4 rows, 6 calls
    last = free.predicted_step_seconds
    for share in (0.8, 0.6, 0.4):
        limit = round(share * peak)
        plan = ps.plan(
            hungry(), num_microbatches=4, schedule="gpipe", memory_limit=limit, replicas=1
        )
        assert max(stage.memory_bytes for stage in plan.stages) <= limit
        assert any(stage.recompute for stage in plan.stages)
        assert plan.predicted_step_seconds >= last  # less memory takes no less time
        last = plan.predicted_step_seconds


def test_no_more_is_recomputed_than_needed() -> None:
    """With all of it the step takes longer, without any it does not fit."""
    limit = 80_000
    ask: dict[str, Any] = {"num_microbatches": 4, "schedule": "gpipe"}
    least = ps.plan(hungry(), memory_limit=limit, **ask, replicas=1)
    everything = ps.plan(hungry(), recompute="boundaries", memory_limit=limit, **ask, replicas=1)
    assert least.predicted_step_seconds < everything.predicted_step_seconds
    with pytest.raises(ps.PlanError, match='What would fit: recompute="auto"'):
        ps.plan(hungry(), recompute="none", memory_limit=limit, **ask, replicas=1)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 8),
    st.integers(8_000, 90_000),
    st.integers(1, 3),
)
def test_every_plan_keeps_its_limit(schedule: str, m: int, limit: int, devices: int) -> None:
    """Also by the simulator's own account, which knows nothing of the planner's."""
    costs = hungry(devices)
    try:
        plan = ps.plan(costs, num_microbatches=m, schedule=schedule, memory_limit=limit, replicas=1)
    except ps.PlanError:
        return
    layout = Layout(costs, m)
    stretches = [Stretch(s.worker, *s.calls, s.recompute) for s in plan.stages]
    held = [layout.held(stretch) for stretch in stretches]
    standing = [0.0] * devices
    for stretch in stretches:
        standing[stretch.worker] += layout.standing(stretch, Memory())
    moving = memory_over_time(plan.timeline(), held)
    assert max(s + memory.peak for s, memory in zip(standing, moving, strict=True)) <= limit
    assert plan.memory_limit == limit


def test_what_is_asked_to_be_recomputed_is() -> None:
    for stage in ps.plan(hungry(), recompute="all", replicas=1).stages:
        assert stage.recompute == (stage.calls,)
    plan = ps.plan(hungry(), recompute="boundaries", schedule="1f1b", replicas=1)
    edges = [[edge for span in stage.recompute for edge in span] for stage in plan.stages]
    assert [(found[0], found[-1]) for found in edges] == [stage.calls for stage in plan.stages]
    inner = {edge for found in edges for edge in found} - {plan.cuts[0], 0, CALLS}
    assert inner == {3, 6, 9} - {plan.cuts[0]}  # where little crosses


def test_recomputing_costs_a_forward() -> None:
    ask: dict[str, Any] = {"num_microbatches": 4, "schedule": "gpipe", "cuts": (6,)}
    plain, again = (
        ps.plan(hungry(), **ask, replicas=1),
        ps.plan(hungry(), recompute="all", **ask, replicas=1),
    )
    for stage, other in zip(plain.stages, again.stages, strict=True):
        added = other.backward_seconds - stage.backward_seconds
        assert added == pytest.approx(stage.forward_seconds)


def test_the_devices_own_memory_is_the_default_limit() -> None:
    small = hungry(capacity={"cpu": 60_000})
    plan = ps.plan(small, num_microbatches=4, schedule="gpipe", replicas=1)
    assert max(stage.memory_bytes for stage in plan.stages) <= 60_000
    assert any(stage.recompute for stage in plan.stages)
    assert plan.memory_limit is None


def test_an_impossible_limit_says_by_how_much_and_what_would_do() -> None:
    with pytest.raises(ps.PlanError) as raised:
        ps.plan(hungry(), num_microbatches=1, schedule="1f1b", memory_limit=5_000, replicas=1)
    text = str(raised.value)
    assert "no plan fits the memory" in text
    assert "and cpu may hold 5.0 kB" in text
    assert "too little. What would fit: num_microbatches=16" in text


def test_weights_that_fit_no_device_need_more_of_them() -> None:
    costs = hungry(weights=(4000,) * CALLS)
    with pytest.raises(ps.PlanError, match="What would fit: 4 devices like these"):
        ps.plan(costs, memory_limit=60_000, replicas=1)
    longer = msgspec.structs.replace(costs, devices=("cpu",) * 4)
    assert ps.plan(longer, memory_limit=60_000, replicas=1).stages


def test_cuts_that_do_not_fit() -> None:
    with pytest.raises(ps.PlanError, match=r"What would fit:.* cuts that Penstock chooses"):
        ps.plan(
            hungry(),
            cuts=(1,),
            memory_limit=16_000,
            num_microbatches=4,
            schedule="gpipe",
            replicas=1,
        )


def test_a_candidate_that_does_not_fit_says_so() -> None:
    plan = ps.plan(hungry(), num_microbatches=4, recompute="none", memory_limit=60_000, replicas=1)
    assert plan.schedule != "gpipe"
    (gpipe,) = [c for c in plan.considered if c.schedule == "gpipe"]
    assert gpipe.predicted_step_seconds is None
    assert gpipe.why.startswith("does not fit the memory by ")
    assert plan.considered[-1].predicted_step_seconds is None


def test_one_device_and_copies_need_memory_too() -> None:
    plan = ps.plan(hungry(weights=(2000,) * CALLS), memory_limit=70_000, replicas=1)
    assert plan.one_device_seconds is None
    assert plan.is_worth_it
    assert "one device does not fit; data parallel does not fit" in plan.summary


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"recompute": "some"}, 'recompute=\'some\' is unknown; choose "auto", "none"'),
        ({"memory_limit": "8 gallons"}, "'8 gallons' is not a size; write it like 8GiB"),
        ({"memory_limit": 0}, "memory_limit=0 must be greater than 0"),
        ({"stages_per_worker": 0}, "stages_per_worker=0 must be an integer of at least 1"),
        ({"optimizer_state": -1.0}, "optimizer_state=-1.0 must be a finite number of at least 0"),
        ({"optimizer_state": float("nan")}, "optimizer_state=nan must be a finite number"),
    ],
)
def test_requests_that_mean_nothing(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.InputError) as raised:
        ps.plan(hungry(), **ask, replicas=1)
    assert message in str(raised.value)


def test_what_is_held_between_pieces_is_counted() -> None:
    layout = Layout(hungry(), 4)  # 4 rows
    stretch = Stretch(0, 2, 8, ((2, 4), (4, 6)))
    # What enters at 2 and at the edges 4 and 6, and what calls 6 and 7 save.
    assert layout.held(stretch) == 4 * (400 + 400 + 50 + 2 * 1000)
    assert layout.standing(stretch, Memory()) == 6 * 10 * 4 + 4 * 2 * 1000
    assert check(
        ps.plan(hungry(), num_microbatches=4, schedule="gpipe", replicas=1).schedule_for(4)
    ).in_flight


def test_an_order_that_fits_is_found() -> None:
    """The weights are at the end, where the small device must not be."""
    costs = hungry(weights=(10,) * 9 + (9_000,) * 3)
    kind = costs.on("cpu")
    mixed = msgspec.structs.replace(
        costs,
        devices=("cpu", "small"),
        kinds={"cpu": kind, "small": msgspec.structs.replace(kind, kind="small")},
        capacity={"small": 60_000},
    )
    ask: dict[str, Any] = {"num_microbatches": 8, "schedule": "1f1b", "cuts": (9,)}
    with pytest.raises(ps.PlanError, match=r"and small may hold 60\.0 kB"):
        ps.plan(mixed, **ask, replicas=1)
    plan = ps.plan(mixed, any_order=True, **ask, replicas=1)
    assert plan.devices == ("small", "cpu")


def test_a_limit_that_nothing_meets_says_what_would_be_enough() -> None:
    with pytest.raises(ps.PlanError) as raised:
        ps.plan(hungry(), memory_limit=900, replicas=1)
    found = re.search(r"What would fit: (\S+) kB more a worker, with recompute", str(raised.value))
    assert found is not None
    enough = 900 + round(1000 * float(found.group(1))) + 50  # it is rounded
    assert ps.plan(hungry(), memory_limit=enough, num_microbatches=16, replicas=1)
    with pytest.raises(ps.PlanError):
        ps.plan(hungry(), memory_limit=enough - 100, num_microbatches=16, replicas=1)


def test_what_is_held_is_never_less_than_nothing() -> None:
    """Differences of sums of fractions may be."""
    saved = (0.7, 0.7, 0.7, 0.4)
    costs = profile([1.0] * 4, saved=saved, boundary=(0.0,) * 5, batch=1)
    stretch = Stretch(0, 0, 4, recompute=((0, 2), (2, 4)))
    assert 0 <= Layout(costs, 1).held(stretch) < 1e-12


@pytest.mark.parametrize("replicas", [1, "auto"])
def test_workers_that_copy_gradients_have_them_twice(replicas: Any) -> None:
    costs = hungry(weights=(1000,) * CALLS, forbidden=dict.fromkeys(range(1, 6), "no"))
    request = Request(num_microbatches=4, schedule="1f1b", replicas=replicas)
    once, twice = (
        plans(costs, request, limits=Limits("why", copies_gradients=copies))[0]
        for copies in (False, True)
    )
    assert once.cuts == twice.cuts
    for one, other in zip(once.stages, twice.stages, strict=True):
        assert other.memory_bytes - one.memory_bytes == one.weight_bytes
    least = max(stage.memory_bytes for stage in once.stages)
    limited = replace(request, memory_limit=least, recompute="none", cuts=once.cuts)
    assert plans(costs, limited)[0].cuts == once.cuts
    with pytest.raises(ps.PlanError, match="no plan fits the memory"):
        plans(costs, limited, limits=Limits("why", copies_gradients=True))
    alone = msgspec.structs.replace(costs, devices=("cpu",))
    held = [
        plans(alone, Request(), limits=Limits(copies_gradients=copies))[0].stages[0].memory_bytes
        for copies in (False, True)
    ]
    assert held[1] - held[0] == CALLS * 1000


def _what_would_fit(costs: ps.Profile, **ask: Any) -> list[dict[str, Any]]:
    """The changes that the error names, as arguments."""
    with pytest.raises(ps.PlanError) as raised:
        ps.plan(costs, **ask)
    found: list[dict[str, Any]] = []
    for text in str(raised.value).rpartition("What would fit: ")[2].split("; "):
        change: dict[str, Any] = {}
        for part in text.split(" with "):
            if match := re.match(r"(\d+) devices like these", part):
                change["devices"] = int(match[1])
            elif part == "cuts that Penstock chooses":
                change["cuts"] = None
            else:
                name, _, value = part.partition("=")
                change[name] = int(value) if value.isdigit() else value.strip('"')
        found.append(change)
    return found


@pytest.mark.parametrize(
    ("changes", "ask"),
    [
        ({"weights": (4000,) * CALLS}, {"cuts": (11,), "memory_limit": 120_000}),
        ({}, {"cuts": (1,), "memory_limit": 16_000, "num_microbatches": 4, "schedule": "gpipe"}),
        ({}, {"schedule": "gpipe", "recompute": "none", "memory_limit": 60_000}),
        (
            {},
            {
                "schedule": "gpipe",
                "recompute": "none",
                "num_microbatches": 4,
                "memory_limit": 40_000,
            },
        ),
        ({}, {"schedule": "interleaved", "recompute": "none", "memory_limit": 12_000}),
        ({"weights": (4000,) * CALLS}, {"memory_limit": 60_000}),
        ({"weights": (4000,) * CALLS}, {"memory_limit": 100_000, "schedule": "zero-bubble-v"}),
    ],
)
def test_what_would_fit_does(changes: dict[str, Any], ask: dict[str, Any]) -> None:
    """Each change alone, and nothing else, makes it possible."""
    for change in _what_would_fit(hungry(**changes), replicas=1, **ask):
        number = change.pop("devices", 2)
        assert ps.plan(hungry(number, **changes), **{**ask, **change}, replicas=1)


@pytest.mark.parametrize("weights", [10, 4000])
def test_what_would_fit_counts_all_replicas(weights: int) -> None:
    changes = {"weights": (weights,) * CALLS}
    ask: dict[str, Any] = {"num_microbatches": 2, "replicas": 2, "recompute": "none"}
    limit = 10_000 if weights == 10 else 70_000
    named = _what_would_fit(hungry(4, **changes), memory_limit=limit, **ask)
    for change in named:
        number = change.pop("devices", 4)
        assert number % 2 == 0
        assert ps.plan(hungry(number, **changes), memory_limit=limit, **{**ask, **change})
