"""One device, replicas, and replicas of pipelines: what they would take."""

from __future__ import annotations

import msgspec
import pytest

import penstock as ps
from penstock.plan.alternatives import alternatives
from penstock.plan.layout import Memory
from penstock.profile.data import Link
from tests.plan.test_plan import profile, scaled


def test_one_device_takes_all_of_it_at_its_best_size() -> None:
    one, _ = alternatives(profile([1.0, 2.0]), Memory())
    # Batches of 16 as two of 8 rows: 3 forward and backward times of 8.1 rows each.
    assert (one.way, one.num_microbatches, one.replicas) == ("one device", 2, 1)
    assert one.predicted_step_seconds == pytest.approx(3 * 3 * 8.1 * 2)


def test_replicas_share_the_rows_and_sum_their_gradients() -> None:
    costs = profile([1.0, 2.0], weights=(600, 400))
    slow = msgspec.structs.replace(
        costs, links={"cpu>cpu": Link(latency_seconds=0.25, bytes_per_second=1000.0)}
    )
    _, free = alternatives(costs, Memory())
    _, parallel = alternatives(slow, Memory())
    assert (parallel.way, parallel.replicas, parallel.num_microbatches) == ("data parallel", 2, 2)
    assert free.predicted_step_seconds == pytest.approx(3 * 3 * 8.1, rel=1e-6)
    # Around a ring of two: half of the bytes there and back, each with its latency.
    assert parallel.predicted_step_seconds == pytest.approx(3 * 3 * 8.1 + 2 * (500 / 1000 + 0.25))


def test_four_devices_may_be_two_pipelines() -> None:
    found = alternatives(profile([1.0] * 8, devices=4), Memory())
    (pipelines,) = [c for c in found if c.stages == 2]
    assert (pipelines.way, pipelines.replicas, pipelines.schedule) == ("data parallel", 2, "1f1b")
    half = ps.plan(profile([1.0] * 8, devices=2, batch=8), schedule="1f1b", replicas=1)
    assert pipelines.predicted_step_seconds == pytest.approx(half.predicted_step_seconds, rel=0.01)


def test_the_slowest_device_decides_for_replicas() -> None:
    costs = profile([1.0, 2.0])
    fast = costs.on("cpu")
    slow = scaled(fast, 3, "slow")
    mixed = msgspec.structs.replace(
        costs, devices=("cpu", "slow"), kinds={"cpu": fast, "slow": slow}
    )
    _, parallel = alternatives(mixed, Memory())
    assert parallel.predicted_step_seconds == pytest.approx(3 * 3 * 3 * 8.1, rel=1e-6)


def test_one_device_is_the_fastest() -> None:
    costs = profile([1.0, 2.0])
    cpu = costs.on("cpu")
    fast = scaled(cpu, 1 / 90, "gpu")
    alone = alternatives(costs, Memory())[0].seconds
    for devices in (("cpu", "gpu"), ("gpu", "cpu")):
        mixed = msgspec.structs.replace(costs, devices=devices, kinds={"cpu": cpu, "gpu": fast})
        assert alternatives(mixed, Memory())[0].seconds == pytest.approx(alone / 90)
        assert "One device alone is predicted to be faster" in str(ps.plan(mixed, replicas=1))


def test_more_devices_than_rows_have_no_data_parallelism() -> None:
    costs = profile([1.0] * 4, devices=4, batch=3)
    found = alternatives(costs, Memory())[1]
    assert found.predicted_step_seconds is None
    assert found.why == "4 replicas cannot share 3 rows"
    plan = ps.plan(costs, replicas=1)
    assert "ata parallel" not in str(plan).split("considered")[0]
    assert "data parallel" not in plan.summary
