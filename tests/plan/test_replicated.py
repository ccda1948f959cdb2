"""Plans of several replicas: who runs what, when one is chosen, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.plan.alternatives import gathering_seconds
from penstock.plan.request import Limits, Request
from penstock.plan.search import plans, plans_on_any
from penstock.plan.shares import BUCKET, blocks, dealt, rows_of_replicas
from penstock.plan.stages import EFFORT
from penstock.plan.text import replicas
from penstock.profile import DeviceProfile
from penstock.profile.data import Link
from penstock.profile.hardware import parse
from penstock.profile.rows import split_rows
from penstock.simulate import Simulator
from tests.plan.test_plan import scaled

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
    with pytest.raises(ps.PlanError, match="3 replicas need as many parts of the devices"):
        plan(profile(4), replicas=3)
    with pytest.raises(ps.PlanError, match="fitted may halve backwards"):
        plan(profile(2), replicas=2, schedule="fitted")
    with pytest.raises(ps.InputError, match=r"replicas=1\.5"):
        Request(replicas=1.5)  # type: ignore[arg-type]


def mixed(*devices: str, weights: int = 0, **capacity: int) -> ps.Profile:
    """The same on devices of which `fast` is four times as fast as `slow`."""
    costs = profile(weights=weights)
    hardware = parse(
        """
        [[device]]
        name = "slow"
        [[device]]
        name = "fast"
        speed = 4.0
        [link]
        bandwidth = "10GB/s"
        """
    )
    described = hardware.apply(costs)
    return msgspec.structs.replace(described, devices=devices, capacity=capacity, batch_size=20)


def test_who_is_faster_runs_more_micro_batches() -> None:
    costs = mixed("slow", "fast")
    found = plan(costs, replicas=2, num_microbatches=10)
    assert found.shares == (2, 8)
    assert [len(found.share(k)) for k in (0, 1)] == [2, 8]
    work = 20 * CALLS * 3e-3  # of the batch on the slow one
    assert found.predicted_step_seconds == pytest.approx(work / 5, rel=0.05)
    alone = plan(msgspec.structs.replace(costs, devices=("fast",)))
    assert found.predicted_step_seconds < alone.predicted_step_seconds


def test_its_timeline_has_the_times_of_every_replica() -> None:
    found = plan(mixed("slow", "fast"), replicas=2, num_microbatches=10)
    timeline = found.timeline()
    assert timeline.num_workers == 2
    numbers = [{e.action.microbatch for e in timeline.events if e.worker == w} for w in (0, 1)]
    assert numbers == [set(found.share(0)), set(found.share(1))]
    slow, fast = timeline.busy()
    assert slow == pytest.approx(fast)  # a quarter of the work on a device a quarter as fast


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first"])
def test_its_timeline_ends_when_the_step_is_predicted_to(schedule: str) -> None:
    """A replica that runs fewer micro-batches has the schedule of so many."""
    costs = mixed("fast", "fast", "slow", "slow", "slow", "slow")
    found = plan(costs, replicas=3, num_microbatches=20, schedule=schedule)
    assert len(set(found.shares)) > 1
    assert found.timeline().seconds == pytest.approx(found.predicted_step_seconds)


@pytest.mark.parametrize("devices", [("fast", "slow", "slow"), ("slow", "fast", "fast")])
def test_there_are_as_many_micro_batches_as_can_be_shared_well(devices: tuple[str, ...]) -> None:
    """The fewest that suit one device may leave another without work."""
    costs = msgspec.structs.replace(mixed(*devices), overhead_seconds=1e-4)
    each = [plan(costs, replicas=3, num_microbatches=count) for count in range(3, 21)]
    best = min(each, key=lambda found: found.predicted_step_seconds)
    found = plan(costs, replicas=3)
    assert found.predicted_step_seconds < 1.02 * best.predicted_step_seconds


def test_rows_are_shared_without_rounding_up_what_is_whole() -> None:
    costs = msgspec.structs.replace(profile(91), batch_size=273)  # 273 * (1 / 91) is more than 3
    found = plan(costs, replicas=91)
    assert found.predicted_step_seconds == pytest.approx(3 * CALLS * 3e-3)


def test_fewer_rows_than_replicas_are_refused() -> None:
    with pytest.raises(ps.PlanError, match="2 replicas cannot share 1 rows"):
        plan(msgspec.structs.replace(profile(2), batch_size=1), replicas=2)


def test_cuts_and_shares_are_for_what_each_replica_has() -> None:
    found = plan(mixed("fast", "fast", "slow", "slow"), replicas=2, schedule="1f1b")
    both = {found.devices[:2], found.devices[2:]}
    if len(both) == 1:  # the same devices in both: stages of other lengths
        first, second = found.stages
        assert {s.device for s in found.stages} == {"fast", "slow"}
        assert first.calls[1] - first.calls[0] != second.calls[1] - second.calls[0]
        assert not found.shares
    else:
        assert found.shares[found.devices.index("fast") // 2] > found.num_microbatches / 2
    work = 20 * CALLS * 3e-3
    assert found.predicted_step_seconds < 1.3 * work / 10  # of all devices at work all the time


def test_a_small_memory_bounds_the_stages_of_all_replicas() -> None:
    weights = 1 << 20
    needs = 4 * CALLS * weights  # with gradients and the state of Adam
    roomy = plan(mixed("fast", "slow", weights=weights), replicas=2)
    assert roomy.replicas == 2
    with pytest.raises(ps.PlanError, match="memory"):
        plan(mixed("fast", "slow", weights=weights, slow=needs // 4), replicas=2)


def test_kept_gradients_and_owned_states_are_counted() -> None:
    weights = 1 << 20
    costs = mixed("fast", "fast", weights=weights)
    apart = plan(costs, replicas=2, num_microbatches=8).stages[0].memory_bytes
    each = CALLS * weights
    assert apart == pytest.approx(each * (2 + 2 / 2 + 4), rel=0.01)
    shared = plan(profile(2, weights=weights), replicas=2, num_microbatches=8)
    assert shared.stages[0].memory_bytes == pytest.approx(each * (4 / 2 + 1), rel=0.01)


def test_what_is_shared_is_dealt_by_weight() -> None:
    assert dealt(5, (1, 1)) == ((0, 2, 4), (1, 3))
    assert [len(share) for share in dealt(10, (2, 8))] == [2, 8]
    assert blocks(5, (1, 1)) == [range(3), range(3, 5)]
    for weights in ((1, 2, 5), (7, 1), (3, 3, 2)):
        assert tuple(map(len, dealt(sum(weights), weights))) == weights
        for count in range(20):
            numbers = sorted(n for share in dealt(count, weights) for n in share)
            assert numbers == list(range(count))


def test_a_file_with_other_shares_than_replicas_is_refused(tmp_path: Path) -> None:
    found = plan(mixed("slow", "fast"), replicas=2, num_microbatches=10)
    found.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json") == found
    for wrong in ({"shares": (5, 4)}, {"shares": (10,)}, {"shares": (0, 10)}):
        msgspec.structs.replace(found, **wrong).save(tmp_path / "wrong.json")
        with pytest.raises(ps.PlanError, match="shares="):
            ps.Plan.load(tmp_path / "wrong.json")
    alone = plan(profile(2), replicas=1, num_microbatches=10)
    msgspec.structs.replace(alone, shares=(2, 8)).save(tmp_path / "wrong.json")
    with pytest.raises(ps.PlanError, match=r"shares=\(2, 8\) are not 1 numbers"):
        ps.Plan.load(tmp_path / "wrong.json")


def test_the_chosen_plan_is_always_listed() -> None:
    for devices in (("slow",), ("slow", "fast", "fast"), ("fast", "slow", "slow")):
        costs = msgspec.structs.replace(mixed(*devices), overhead_seconds=1e-3)
        found = plan(costs, replicas=len(devices))
        assert [line for line in str(found).splitlines() if line.endswith("  chosen")]
        same_kind = [c for c in found.considered if not c.only_compared]
        assert min(c.seconds for c in same_kind) == pytest.approx(found.predicted_step_seconds)


def test_many_different_devices_are_planned_with_little_effort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where even the likeliest case would take too long, the cheapest is tried."""
    simulated = []
    times = Simulator.times

    def counted(self: Simulator, *args: Any) -> Any:
        simulated.append(len(self.actions))
        return times(self, *args)

    monkeypatch.setattr(Simulator, "times", counted)
    names, calls = tuple(f"device{k}" for k in range(16)), 64
    costs = profile(len(names))
    kinds = {}
    for k, name in enumerate(names):
        each = 1e-3 / (1 + 0.1 * (k % 7))
        forward, backward = (
            tuple((times * each * rows,) * calls for rows in (1, 2, 4, 8)) for times in (1, 2)
        )
        kind = msgspec.structs.replace(costs.kinds["cpu"], forward=forward, backward=backward)
        kinds[name] = kind
    many = msgspec.structs.replace(
        costs,
        devices=names,
        kinds=kinds,
        batch_size=4096,
        labels=tuple(f"layer{k}" for k in range(calls)),
        weights=(1,) * calls,
        saved=(1.0,) * calls,
        boundary=(0.0,) * (calls + 1),
    )
    assert plans(many, Request())[0].devices
    assert sum(simulated) < EFFORT


@pytest.mark.parametrize(
    ("in_one_memory", "batch", "count", "rows"),
    [
        (True, 16, 3, 6 + 5),  # of 6, 5 and 5 rows
        (False, 16, 3, 6 + 5),
        (True, 6, 4, 2 + 1),  # of 2, 2, 1 and 1: dealt one by one
        (False, 6, 4, 2 + 2),  # a block
    ],
)
def test_a_replica_is_planned_with_the_micro_batches_that_it_gets(
    in_one_memory: bool, batch: int, count: int, rows: int
) -> None:
    costs = msgspec.structs.replace(profile(2), batch_size=batch)
    request = Request(replicas=2, num_microbatches=count)
    found = plans(costs, request, limits=Limits(in_one_memory=in_one_memory))[0]
    assert found.predicted_step_seconds == pytest.approx(rows * CALLS * 3e-3)
    assert found.stages[0].memory_bytes == found.microbatch_size * CALLS  # saved, by the largest
    assert found.stages[0].forward_seconds == pytest.approx(found.microbatch_size * CALLS * 1e-3)


def test_unequal_replicas_are_planned_with_the_micro_batches_that_they_get() -> None:
    found = plan(mixed("slow", "fast"), replicas=2, num_microbatches=7)
    of_each = rows_of_replicas(split_rows(20, 7), found.shares, "chained")
    work = [sum(rows) * CALLS * 3e-3 for rows in of_each]
    assert found.predicted_step_seconds == pytest.approx(max(work[0], work[1] / 4))


def apart(*latencies: float) -> ps.Profile:
    """The same on devices of one speed that differ in their names, with links between neighbours.

    Args:
        latencies: of these links.
    """
    names = [f"cuda:{k}" for k in range(len(latencies) + 1)]
    costs = profile(len(names))
    links = {}
    for (one, other), seconds in zip(pairwise(names), latencies, strict=True):
        links[f"{one}>{other}"] = links[f"{other}>{one}"] = Link(latency_seconds=seconds)
    kinds = {name: msgspec.structs.replace(costs.kinds["cpu"], kind=name) for name in names}
    return msgspec.structs.replace(costs, devices=tuple(names), kinds=kinds, links=links)


def test_links_that_were_not_measured_are_not_free() -> None:
    """Devices dealt out have no measured link between the stages of a replica."""
    costs = apart(1e-3, 3e-3, 1e-3)
    assert costs.link("cuda:2", "cuda:1") == Link(latency_seconds=3e-3)
    assert costs.link("cuda:0", "cuda:2") == Link(latency_seconds=3e-3)
    found = plan(costs, replicas=2, num_microbatches=4, schedule="1f1b")
    assert found.devices == costs.devices  # neighbours together
    assert found.stages[1].latency_seconds == 1e-3
    alone = msgspec.structs.replace(costs, links={})
    assert alone.link("cuda:0", "cuda:1") == Link()


THREADS = Limits(in_one_process=True)


def test_replicas_of_stages_in_one_process_run_equally_many() -> None:
    """With other shares they could wait for each other's turns for ever, and are refused."""
    costs = apart(0.0, 0.0, 0.0)
    request = Request(replicas=2, num_microbatches=5)
    assert plans(costs, request)[0].shares == (3, 2)  # on ranks
    found = plans(costs, request, limits=THREADS)[0]
    assert (found.workers_per_replica, found.shares, found.weights) == (2, (), (1, 1))
    assert [len(found.share(k)) for k in (0, 1)] == [3, 2]
    assert {stage.device for stage in found.stages_of(1)} == set(found.devices[2:])
    assert [line.split()[-5] for line in replicas(found)[1:]] == ["3", "2"]
    slow = msgspec.structs.replace(costs.kinds["cuda:3"], forward=costs.kinds["cuda:3"].backward)
    slower = msgspec.structs.replace(costs, kinds={**costs.kinds, "cuda:3": slow})
    four = Request(replicas=2, num_microbatches=4)
    equal, unequal = (plans(own, four, limits=THREADS)[0] for own in (costs, slower))
    assert not unequal.shares
    assert unequal.predicted_step_seconds > equal.predicted_step_seconds
    alone = plans(slower, Request(replicas=4, num_microbatches=16), limits=THREADS)[0]
    assert alone.shares[3] < alone.shares[0]  # one worker each


def test_the_first_replica_has_all_optimizer_state_in_one_process() -> None:
    """And all gradients come to it: one set of each replica waits there for its turn."""
    weights = 1 << 20
    costs = msgspec.structs.replace(apart(0.0), weights=(weights,) * CALLS)
    request = Request(replicas=2, num_microbatches=8)
    found = plans(costs, request, limits=THREADS)[0]
    first, other = (found.stages_of(k)[0].memory_bytes / (CALLS * weights) for k in (0, 1))
    assert first == pytest.approx(1 + 1 + 2 + 2, rel=0.01)  # weights, gradients, Adam, waiting
    assert other == pytest.approx(1 + 1, rel=0.01)
    limit = 5 * CALLS * weights
    with pytest.raises(ps.PlanError, match="no plan fits the memory"):
        plans(costs, replace(request, memory_limit=limit), limits=THREADS)
    small = msgspec.structs.replace(costs, capacity={"cuda:1": limit})
    assert plans(small, request, limits=THREADS)[0].replicas == 2
    small = msgspec.structs.replace(costs, capacity={"cuda:0": limit})
    with pytest.raises(ps.PlanError, match="memory"):
        plans(small, request, limits=THREADS)


def test_gradients_travel_to_the_first_replica_while_others_are_computed() -> None:
    link = Link(latency_seconds=1.0, bytes_per_second=10.0)
    size, replicas, share = 4.0 * BUCKET, 3, 4
    copying = 2 * size / 10  # the weights, to two replicas, or gradients of a micro-batch from them
    adding = 2 * size / 5

    def beside(seconds: float) -> float:
        return gathering_seconds(size, replicas, share, link, adding=5.0, seconds=seconds)

    assert beside(1e12) == copying + 2 * BUCKET / 10 + 2 + adding  # the last buckets of two
    assert beside(10.0) == copying + (share * copying - 10) + 2 + adding
    small = gathering_seconds(20.0, replicas, share, link, adding=5.0, seconds=100.0)
    assert small == 2 * 2 * 20 / 10 + 2 + 2 * 20 / 5


def test_no_replica_has_micro_batches_that_the_model_refuses() -> None:
    """BatchNorm, for one, refuses a single row: then no smaller size was measured."""
    costs = profile(2)
    kind = costs.on("cpu")
    lines = {"forward": kind.forward[1:], "backward": kind.backward[1:]}
    refused = msgspec.structs.replace(kind, rows=kind.rows[1:], **lines)
    few = msgspec.structs.replace(costs, batch_size=3, kinds={"cpu": refused})
    assert plan(few).replicas == 1
    assert plan(few, replicas=2).replicas == 2  # as asked for
    assert plan(msgspec.structs.replace(few, batch_size=4)).microbatch_size >= 2


@pytest.mark.parametrize(("share", "workers"), [(1.0, 2), (0.99, 2), (0.95, 1)])
def test_one_worker_with_all_cores_has_to_be_clearly_faster(share: float, workers: int) -> None:
    """Such differences are within the noise of a profile, and its threads wait for each other."""
    several = msgspec.structs.replace(profile(2), threads=1)
    seconds = plans_on_any([several], Request())[0].predicted_step_seconds
    alone = plans_on_any([several.alone("cpu")], Request())[0].predicted_step_seconds
    factor = share * seconds / alone
    faster = scaled(several.on("cpu"), factor)
    one = msgspec.structs.replace(several, devices=("cpu",), threads=2, kinds={"cpu": faster})
    for both in ([one, several], [several, one]):
        found = plans_on_any(both, Request())[0]
        assert len(found.devices) == workers
        assert (
            f"{found.predicted_step_seconds:.3f}"
            == f"{seconds * (share if workers == 1 else 1):.3f}"
        )
