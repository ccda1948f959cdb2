"""Plans: choosing on profiles made by hand, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.profile import DeviceProfile
from penstock.schedule import SCHEDULES
from penstock.schedule.fitted import Rules


def profile(calls: list[float], devices: int = 2, batch: int = 16, **changes: Any) -> ps.Profile:
    """Calls of these forward seconds per row, twice that backward, and 10 % launch overhead."""
    rows = (1, 2, 4, 8)
    forward = tuple(tuple(c * (0.1 + n) for c in calls) for n in rows)
    backward = tuple(tuple(2 * x for x in line) for line in forward)
    kind = DeviceProfile(kind="cpu", rows=rows, forward=forward, backward=backward, spread=0.0)
    found = ps.Profile(
        fingerprint="f" * 16,
        batch_size=batch,
        devices=("cpu",) * devices,
        kinds={"cpu": kind},
        labels=tuple(f"call{i}" for i in range(len(calls))),
        weights=(4,) * len(calls),
        boundary=(8.0,) * (len(calls) + 1),
        forbidden={},
    )
    return msgspec.structs.replace(found, **changes)


def scaled(kind: DeviceProfile, factor: float, name: str = "cpu") -> DeviceProfile:
    """A device on which every call takes so many times as long."""
    tables = {
        table: tuple(tuple(factor * x for x in line) for line in getattr(kind, table))
        for table in ("forward", "backward")
    }
    return msgspec.structs.replace(kind, kind=name, **tables)


def test_the_choice_is_the_best_that_was_considered() -> None:
    plan = ps.plan(profile([1, 2, 3, 4, 3, 2, 1]), replicas=1)
    split = [c for c in plan.considered if c.way == "pipeline"]
    assert plan.predicted_step_seconds <= 1.002 * min(c.predicted_step_seconds or 0 for c in split)
    measured = {2, 4, 8, 16}  # of the sizes 1, 2, 4, 8
    assert {c.num_microbatches for c in split} == measured
    assert {c.schedule for c in split} >= set(SCHEDULES) - {"fitted"}
    assert plan.bound_seconds <= plan.predicted_step_seconds * (1 + 1e-9)
    assert plan.is_worth_it
    assert len(plan.devices) == 2
    assert plan.stages[0].calls[1] == plan.stages[1].calls[0] == plan.cuts[0]


def test_explicit_choices_are_respected() -> None:
    plan = ps.plan(profile([1.0] * 6), num_microbatches=5, schedule="gpipe", cuts=(1,), replicas=1)
    assert (plan.num_microbatches, plan.schedule, plan.cuts) == (5, "gpipe", (1,))
    assert plan.microbatch_size == 4


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 3, 5, 16])
def test_the_bound_holds_for_every_cut(devices: int, count: int) -> None:
    costs = profile([1, 5, 2, 2], devices)
    bound = ps.plan(costs, num_microbatches=count, replicas=1).bound_seconds
    for first in range(1, 4):
        cuts = tuple(range(first, first + devices - 1))
        if not cuts or cuts[-1] < 4:
            for schedule in ("naive", "gpipe", "1f1b", "eager-1f1b"):
                plan = ps.plan(
                    costs, num_microbatches=count, schedule=schedule, cuts=cuts, replicas=1
                )
                assert plan.predicted_step_seconds >= bound * (1 - 1e-9)


def test_forbidden_cuts_are_avoided() -> None:
    costs = profile([1.0] * 4, forbidden={2: "because", 3: "because"})
    assert ps.plan(costs, replicas=1).cuts == (1,)
    with pytest.raises(ps.PlanError, match="only 0 of the 3"):
        ps.plan(
            msgspec.structs.replace(costs, forbidden=dict.fromkeys((1, 2, 3), "no")), replicas=1
        )


def test_more_microbatches_than_rows() -> None:
    with pytest.raises(ps.InputError, match=r"num_microbatches=17.*16 rows"):
        ps.plan(profile([1.0, 1.0]), num_microbatches=17, replicas=1)


def test_it_says_when_splitting_is_not_worth_it() -> None:
    costs = profile([1.0, 1e-6], batch=1)
    plan = ps.plan(costs, replicas=1)
    assert not plan.is_worth_it
    assert str(plan).startswith("One device alone is predicted to be faster (")
    assert "splitting is not worth it" in str(plan)


def test_it_says_when_data_parallelism_is_faster() -> None:
    """One call has nearly all of the work: it cannot be shared out, but its rows can."""
    plan = ps.plan(profile([1e-3, 1.0, 1e-3]), replicas=1)
    assert plan.is_worth_it is (plan.predicted_step_seconds < (plan.one_device_seconds or 0))
    assert plan.data_parallel_seconds is not None
    assert plan.data_parallel_seconds < 0.6 * plan.predicted_step_seconds
    assert str(plan).startswith("Data parallelism is predicted to be faster (")
    assert plan.considered[0].way == "data parallel"


def test_seconds_between_and_beyond_what_was_measured() -> None:
    kind = profile([2.0]).on("cpu")
    assert kind.seconds(3)[0][0] == pytest.approx(2 * 3.1)
    assert kind.seconds(16)[0][0] == pytest.approx(2 * 16.2)  # in proportion to 8 rows
    assert kind.seconds(1)[1][0] == pytest.approx(2 * 2 * 1.1)


def test_a_profile_survives_a_file() -> None:
    costs = profile([1.0, 2.0], forbidden={1: "why"})
    assert msgspec.json.decode(msgspec.json.encode(costs), type=ps.Profile) == costs


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    plan, path = ps.plan(profile([1, 2, 3]), replicas=1), tmp_path / "plan.json"
    path.write_text("old")
    plan.save(path)
    assert ps.Plan.load(path) == plan
    assert list(tmp_path.iterdir()) == [path]
    assert '"first": "call0"' in path.read_text()


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"stages": 3}')
    with pytest.raises(ps.PlanError, match=r"plan.json is not a plan"):
        ps.Plan.load(path)
    msgspec.structs.replace(ps.plan(profile([1, 2]), replicas=1), version=99).save(path)
    with pytest.raises(ps.PlanError, match="version 99, this Penstock reads version 3"):
        ps.Plan.load(path)


def test_a_plan_knows_its_model() -> None:
    plan = ps.plan(profile([1, 2, 3]), replicas=1)
    with pytest.raises(ps.PlanError, match=r"made for another model.*began with call0, call"):
        plan.check_fits("0" * 16, ["cpu", "cpu"], 3)


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "foo"},
        {"num_microbatches": 0},
        {"bound_seconds": 0.0},
        {"worker": -1},
        {"worker": 7},
        {"calls": (0, 1)},
        {"calls": (99, 100)},
        {"recompute": ((0, 99),)},
        {"rules": Rules((2, 2), (2, 1))},
        {"rules": Rules((2, 2, 2), (2, 1, 1)), "schedule": "fitted"},
        {"schedule": "fitted"},
    ],
)
def test_a_file_that_was_edited_to_nonsense(change: dict[str, Any], tmp_path: Path) -> None:
    plan = ps.plan(profile([1.0] * 6), replicas=1)
    if change.keys() & {"worker", "calls", "recompute"}:
        last = msgspec.structs.replace(plan.stages[-1], **change)
        change = {"stages": (*plan.stages[:-1], last)}
    msgspec.structs.replace(plan, **change).save(tmp_path / "plan.json")
    with pytest.raises(ps.PlanError, match=r"plan\.json is not a plan that can be followed"):
        ps.Plan.load(tmp_path / "plan.json")


def test_a_plan_whose_stages_were_moved_by_hand(tmp_path: Path) -> None:
    plan, path = (
        ps.plan(profile([1, 2, 3, 4]), schedule="zero-bubble-v", replicas=1),
        tmp_path / "plan.json",
    )
    first, second, *others = plan.stages
    moved = [
        msgspec.structs.replace(first, worker=second.worker),
        msgspec.structs.replace(second, worker=first.worker),
    ]
    msgspec.structs.replace(plan, stages=(*moved, *others)).save(path)
    with pytest.raises(ps.PlanError, match=r"zero-bubble-v does not run stages on workers \(1, 0"):
        ps.Plan.load(path)
    with pytest.raises(ps.PlanError, match="last stage ends with call 3, and the program has 5"):
        plan.check_fits(plan.fingerprint, plan.devices, 5)


def test_calls_that_take_no_time_leave_the_bound_as_it_is() -> None:
    """Such as those of a model without weights that read nothing but objects."""
    ask: dict[str, Any] = {"num_microbatches": 4, "schedule": "1f1b", "replicas": 1}
    plain, more = ([1.0] * 4, [1.0, 1.0, 0.0, 1.0, 1.0])
    bounds = [ps.plan(profile(calls), **ask).bound_seconds for calls in (plain, more)]
    assert bounds[0] == pytest.approx(bounds[1])
