"""Plans of several replicas: who runs what, when one is chosen, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.plan.request import Request
from penstock.plan.search import plans
from penstock.profile import DeviceProfile

CALLS = 8


def profile(devices: int = 4, weights: int = 0) -> ps.Profile:
    """Eight calls of 1 ms forward and 2 ms backward a row, and what crosses between them."""
    rows = (1, 2, 4, 8)
    forward = tuple((1e-3 * r,) * CALLS for r in rows)
    backward = tuple((2e-3 * r,) * CALLS for r in rows)
    kind = DeviceProfile(kind="cpu", rows=rows, forward=forward, backward=backward, spread=0.0)
    return ps.Profile(
        fingerprint="0123456789abcdef",
        batch_size=16,
        devices=("cpu",) * devices,
        kinds={"cpu": kind},
        labels=tuple(f"layer{k}" for k in range(CALLS)),
        weights=(weights,) * CALLS,
        boundary=(0.0,) * (CALLS + 1),
        forbidden={},
        saved=(1.0,) * CALLS,
    )


def plan(costs: ps.Profile, **request: Any) -> ps.Plan:
    return plans(costs, Request(**request))[0]


@pytest.mark.parametrize(("replicas", "stages"), [(1, 4), (2, 2), (4, 1)])
def test_devices_and_micro_batches_are_shared(replicas: int, stages: int) -> None:
    found = plan(profile(), replicas=replicas, schedule="1f1b", num_microbatches=8)
    assert (found.replicas, len(found.stages)) == (replicas, stages)
    assert found.devices == ("cpu",) * 4
    assert (found.num_microbatches, found.batch_size) == (8, 16)
    shares = [list(found.share(k)) for k in range(replicas)]
    assert sorted(number for share in shares for number in share) == list(range(8))
    timeline = found.timeline()
    assert timeline.num_workers == 4
    worked = {(e.worker // stages, e.action.microbatch) for e in timeline.events}
    assert worked == {(k, number) for k, share in enumerate(shares) for number in share}


def test_auto_is_the_fastest_of_all_numbers() -> None:
    each = {r: plan(profile(), replicas=r).predicted_step_seconds for r in (1, 2, 4)}
    found = plan(profile(), replicas="auto")
    assert found.predicted_step_seconds == min(each.values())
    assert found.replicas == 4  # nothing crosses, and no stage waits for another
    assert found.way == "data parallel"
    pipelines = [c for c in found.considered if c.way == "pipeline"]
    assert {c.replicas for c in pipelines} == {1, 2}
    (chosen,) = [c for c in found.considered if c.why == "chosen"]
    assert (chosen.way, chosen.replicas) == ("data parallel", 4)
    assert not any(c.only_compared for c in found.considered)
    heavy = plan(profile(weights=1 << 30), replicas="auto")
    assert heavy.replicas == 1  # adding gradients takes longer than all else
    assert plan(profile(3), replicas="auto").replicas in (1, 3)


def test_as_many_micro_batches_as_asked_for_even_if_shares_differ() -> None:
    found = plan(profile(2), replicas=2, num_microbatches=5)
    assert found.num_microbatches == 5
    assert [len(found.share(k)) for k in (0, 1)] == [3, 2]


def test_a_file_has_all_of_it(tmp_path: Path) -> None:
    found = plan(profile(), replicas=2)
    found.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json") == found
    assert "2 replicas" in str(found)
    wrong = msgspec.structs.replace(found, other_replicas=(("cpu",),))
    wrong.save(tmp_path / "wrong.json")
    with pytest.raises(ps.PlanError, match="each needs 2 devices"):
        ps.Plan.load(tmp_path / "wrong.json")
    few = msgspec.structs.replace(found, num_microbatches=1)
    few.save(tmp_path / "few.json")
    with pytest.raises(ps.PlanError, match="2 replicas cannot share 1 micro-batches"):
        ps.Plan.load(tmp_path / "few.json")


def test_what_cannot_be_says_why() -> None:
    with pytest.raises(ps.PlanError, match="3 replicas need as many equal parts"):
        plan(profile(4), replicas=3)
    kind = profile().kinds["cpu"]
    unlike = msgspec.structs.replace(
        profile(2), devices=("cpu", "cuda"), kinds={"cpu": kind, "cuda": kind}
    )
    with pytest.raises(ps.PlanError, match="2 replicas need as many equal parts"):
        plan(unlike, replicas=2)
    with pytest.raises(ps.PlanError, match="fitted may halve backwards"):
        plan(profile(2), replicas=2, schedule="fitted")
    with pytest.raises(ps.InputError, match=r"replicas=1\.5"):
        Request(replicas=1.5)  # type: ignore[arg-type]
