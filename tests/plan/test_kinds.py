"""The kinds of plans, of which the fastest is taken: stages, replicas, both, or one device."""

from __future__ import annotations

import msgspec
import pytest

import penstock as ps
from penstock.plan.decisions import WORTH_FEWER
from penstock.plan.request import Limits, Request
from penstock.plan.search import plans, plans_on_any
from penstock.plan.text import advice, verdict
from penstock.profile import DeviceProfile
from tests.plan.test_replicated import CALLS, mixed, plan, profile


def with_threads(workers: int, threads: int, a_row: float) -> ps.Profile:
    """So many workers, each of which takes so long for a row of a call."""
    rows = (1, 2, 4, 8)
    forward = tuple((a_row * r,) * CALLS for r in rows)
    backward = tuple((2 * a_row * r,) * CALLS for r in rows)
    kind = DeviceProfile(kind="cpu", rows=rows, forward=forward, backward=backward, spread=0.0)
    return msgspec.structs.replace(profile(workers), kinds={"cpu": kind}, threads=threads)


def test_the_fastest_of_all_kinds_is_the_default() -> None:
    assert ps.plan(profile()).way == "data parallel"
    costs = msgspec.structs.replace(profile(4, weights=10**7), batch_size=64)
    found = ps.plan(costs)
    each = {r: ps.plan(costs, replicas=r).predicted_step_seconds for r in (1, 2, 4)}
    assert found.predicted_step_seconds == min(each.values())


def test_one_device_where_more_do_not_pay() -> None:
    found = ps.plan(profile(2, weights=10**10))  # gradients take seconds to be added
    split = ps.plan(profile(2, weights=10**10), replicas=1)
    assert split.way == "pipeline"
    assert found.way != "data parallel"
    never = msgspec.structs.replace(
        profile(2, weights=10**10), overhead_seconds=0.0, forbidden=dict.fromkeys(range(1, 8), "no")
    )
    alone = ps.plan(never)
    assert (alone.way, alone.devices) == ("one device", ("cpu",))
    (said,) = [line for line in advice(alone) if "not used" in line]
    assert "not used; replicas=2 runs 2 replicas." in said
    with pytest.raises(ps.PlanError, match="need 1 cuts"):
        ps.plan(never, replicas=1)


def test_fewer_devices_have_to_be_clearly_faster() -> None:
    """A little of it may be noise of the profile."""
    costs = profile(2)
    alone = plans(msgspec.structs.replace(costs, devices=("cpu",)), Request())[0]
    gain = alone.predicted_step_seconds * (WORTH_FEWER - 1)

    def bytes_for(extra: float) -> int:
        """Weights with which two replicas take so much longer than one device."""
        free = ps.plan(costs, replicas=2).predicted_step_seconds
        missing = alone.predicted_step_seconds + extra - free
        return int(missing * 4e9 / CALLS)

    no_cuts = dict.fromkeys(range(1, CALLS), "no")
    for extra, kind in ((0.5 * gain, "data parallel"), (1.5 * gain, "one device")):
        weights = (bytes_for(extra),) * CALLS
        found = ps.plan(msgspec.structs.replace(costs, weights=weights, forbidden=no_cuts))
        assert found.way == kind


@pytest.mark.parametrize("asked", [{"schedule": "1f1b"}, {"cuts": (4,)}, {"stages_per_worker": 1}])
def test_who_asks_for_stages_gets_them(asked: dict[str, object]) -> None:
    found = plan(profile(2), **asked)
    assert (found.way, found.replicas, len(found.stages)) == ("pipeline", 1, 2)
    assert {c.way for c in found.considered if not c.only_compared} == {"pipeline"}


@pytest.mark.parametrize(("ratio", "way"), [(1.5, "data parallel"), (2.5, "one device")])
def test_one_device_alone_is_not_slowed_down_by_others(ratio: float, way: str) -> None:
    """Two workers that take 2.5 times as long beside each other are slower than one of them."""
    costs = profile(2)
    kind = msgspec.structs.replace(costs.kinds["cpu"], contention=(ratio,) * 4)
    slowed = msgspec.structs.replace(costs, kinds={"cpu": kind})
    alone = plan(msgspec.structs.replace(costs, devices=("cpu",)), replicas=1)
    seconds = alone.predicted_step_seconds / ratio
    found = plan(slowed)
    assert found.way == way
    assert found.one_device_seconds == pytest.approx(seconds)
    compared = plan(slowed, schedule="1f1b")  # with one device, which is not asked for
    assert compared.one_device_seconds == pytest.approx(seconds)
    split = [c.predicted_step_seconds for c in compared.considered if c.way == "pipeline"]
    assert split == [
        c.predicted_step_seconds
        for c in plan(costs, schedule="1f1b").considered
        if c.way == "pipeline"
    ]


def test_replicas_add_every_gradient_of_every_micro_batch_in_order() -> None:
    costs = profile(2)
    small = msgspec.structs.replace(costs, parameters=(3,) * CALLS, adding_seconds=1e-3)
    asked = {"num_microbatches": 8, "schedule": "1f1b"}
    for replicas, more in ((2, 8 / 2 * 3 * CALLS * 1e-3), (1, 0.0)):
        free, added = (plan(c, replicas=replicas, **asked) for c in (costs, small))
        expected = free.predicted_step_seconds + more
        assert added.predicted_step_seconds == pytest.approx(expected)
        assert added.one_device_seconds == free.one_device_seconds
    assert plan(costs).way == "data parallel"
    assert plan(msgspec.structs.replace(small, adding_seconds=1.0)).replicas == 1


def test_one_candidate_is_the_chosen_one() -> None:
    alone = msgspec.structs.replace(
        mixed("slow", "fast", weights=10**10), forbidden=dict.fromkeys(range(1, CALLS), "no")
    )  # each device is a plan of its own
    for costs, most in ((alone, 1), (profile(2), 4), (mixed("slow", "fast"), 4)):
        best = plans(costs, Request(), most)[0]
        (chosen,) = [c for c in best.considered if c.why == "chosen"]
        assert chosen.predicted_step_seconds == pytest.approx(best.predicted_step_seconds)
        assert (chosen.way, chosen.schedule) == (best.way, best.schedule)
        assert chosen.num_microbatches == best.num_microbatches


def test_limits_of_workers_and_of_models() -> None:
    """They leave one replica, and the plan says why."""
    why = "There is one replica, as nobody can have two."
    found = plans(profile(2), Request(), limits=Limits(one_replica=why))[0]
    assert (found.replicas, found.note) == (1, why)
    assert why in str(found)
    of_model = msgspec.structs.replace(profile(2), one_replica=why)
    assert plans(of_model, Request())[0].note == why
    assert plans(of_model, Request(replicas=2))[0].replicas == 2  # who asks for two gets them
    everywhere = msgspec.structs.replace(
        profile(2, weights=10**10), forbidden=dict.fromkeys(range(1, CALLS), "no")
    )
    assert plans(everywhere, Request(), limits=Limits(all_devices=True))[0].replicas == 2


@pytest.mark.parametrize(
    ("a_row", "gain", "threads"),
    [(1e-5, 1.05, 1), (1e-5, 0.95, 1), (1e-5, 1.2, 2), (1.0, 1.05, 2)],
)
def test_short_steps_have_more_threads_only_if_they_help(
    a_row: float, gain: float, threads: int
) -> None:
    """A core that hardly helps is left alone: see `WORTH_THREADS`."""
    costs = [with_threads(1, 2, a_row / gain), with_threads(1, 1, a_row)]
    best = plans_on_any(costs, Request())[0]
    assert (best.way, best.threads) == ("one device", threads)
    (chosen,) = [c for c in best.considered if c.why == "chosen"]
    assert chosen.threads == threads
    if threads == 1 and gain > 1:
        assert best.considered[0].threads == 2
        assert best.considered[0].why == f"{1 - 1 / gain:.1%} faster, with more threads"


def test_how_many_workers_share_the_cores() -> None:
    """One worker with both cores, or two with one each: whichever is faster."""
    for a_row, kind, threads in ((0.6e-3, "data parallel", 1), (0.4e-3, "one device", 2)):
        costs = [with_threads(1, 2, a_row), with_threads(2, 1, 1e-3)]
        found = plans_on_any(costs, Request())[0]
        assert (found.way, found.threads) == (kind, threads)
        ways = {(c.way, c.threads) for c in found.considered if not c.only_compared}
        assert ways >= {("one device", 2), ("data parallel", 1), ("pipeline", 1)}
        assert "threads" in str(found)


@pytest.mark.parametrize("gain", [1.01, 0.99])
def test_one_worker_that_is_about_as_fast_has_its_place_among_the_others(gain: float) -> None:
    """It is measured with them, and the first line does not say that it is slower if it is not."""
    two = with_threads(2, 1, 1e-3)
    seconds = plans_on_any([two], Request())[0].predicted_step_seconds
    whole = plans_on_any([with_threads(1, 2, 1e-3)], Request())[0].predicted_step_seconds
    one = with_threads(1, 2, 1e-3 * seconds / whole / gain)
    best, *others = plans_on_any([one, two], Request(), 20)
    assert len(best.devices) == 2
    seconds_of = [found.predicted_step_seconds for found in others]
    assert seconds_of == sorted(seconds_of)
    alone = next(found for found in others if found.way == "one device")
    ratio = best.predicted_step_seconds / alone.predicted_step_seconds
    assert ratio == pytest.approx(gain, abs=0.005)
    said = verdict(best)
    assert best.is_worth_it is ("2 replicas are predicted to be the fastest" in said) is (gain < 1)
    assert ("and one device alone" in said and "within the noise" in said) is (gain > 1)
    said = verdict(alone)  # if it was measured to be faster
    assert said.startswith("One worker with 2 intra-op threads is predicted to ")
    assert ("and the best plan of several workers" in said) is (gain < 1)


def test_what_one_worker_takes_alone_is_not_derived_where_it_was_measured() -> None:
    one, two = with_threads(1, 1, 1e-5), with_threads(2, 1, 1e-5)
    kind = msgspec.structs.replace(two.kinds["cpu"], contention=(100.0,) * 4)
    derived = msgspec.structs.replace(two, kinds={"cpu": kind})
    fastest = plans_on_any([derived], Request())[0].predicted_step_seconds
    found = plans_on_any([one, derived], Request())[0]
    alone = [c.seconds for c in found.considered if c.way == "one device"]
    assert min(alone) > 10 * fastest
    assert min(alone) == pytest.approx(plans_on_any([one], Request())[0].predicted_step_seconds)


@pytest.mark.parametrize(("gain", "count"), [(1.03, 1), (1.08, 2)])
def test_a_single_device_splits_a_batch_only_if_that_helps(gain: float, count: int) -> None:
    """Half the rows take a little less than half the time: that may be noise of the profile."""
    costs = with_threads(1, 1, 1e-3)
    kind = costs.kinds["cpu"]
    slow = {"forward": kind.forward, "backward": kind.backward}
    slow = {k: (*v[:-1], tuple(gain * s for s in v[-1])) for k, v in slow.items()}
    costs = msgspec.structs.replace(
        costs, batch_size=8, kinds={"cpu": msgspec.structs.replace(kind, **slow)}
    )
    assert plans_on_any([costs], Request())[0].num_microbatches == count


def test_more_devices_than_calls() -> None:
    """The tutorial of nn.DataParallel: a model of one layer on eight devices."""
    costs = profile(8)
    one = msgspec.structs.replace(
        costs,
        labels=("layer",),
        weights=(4,),
        boundary=(0.0, 0.0),
        saved=(1.0,),
        kinds={
            "cpu": msgspec.structs.replace(
                costs.kinds["cpu"],
                forward=tuple(line[:1] for line in costs.kinds["cpu"].forward),
                backward=tuple(line[:1] for line in costs.kinds["cpu"].backward),
            )
        },
    )
    assert plan(one, replicas=8).replicas == 8
    assert plan(one).way == "data parallel"


def test_one_worker_of_several_may_be_faster_than_one_with_all_cores() -> None:
    """Small calls gain nothing from more threads, nor beside another worker."""
    both, alone = with_threads(1, 2, 1.0e-3), with_threads(2, 1, 1.8e-3)
    kind = msgspec.structs.replace(alone.kinds["cpu"], contention=(2.0,) * 4)
    heavy = msgspec.structs.replace(alone, kinds={"cpu": kind}, weights=(10**9,) * CALLS)
    found = plans_on_any([both, heavy], Request())[0]
    assert (found.devices, found.threads) == (("cpu",), 1)
    assert found.predicted_step_seconds == pytest.approx(found.one_device_seconds)
    whole = plans_on_any([both, heavy], Request(), limits=Limits(all_devices=True))[0]
    assert whole.threads == 2 or len(whole.devices) == 2
