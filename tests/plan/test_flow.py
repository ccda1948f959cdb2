"""Plans for inference: the busiest worker of a steady flow, and memory with states."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock as ps
from penstock.plan.flow import plans_of_flow
from penstock.plan.layout import Memory
from penstock.plan.request import Limits, Request
from penstock.plan.whatif import WhatIf, what_if, what_if_planned
from penstock.profile import DeviceProfile
from penstock.profile.data import Link

CALLS = 9


def costs(
    devices: tuple[str, ...] = ("cpu", "cpu"), seed: int = 0, links: bool = True, **changes: Any
) -> ps.Profile:
    """Calls of unequal seconds on devices of unequal speed, with boundaries of unequal size."""
    random = np.random.default_rng(seed)
    kinds = {}
    for name in dict.fromkeys(devices):
        each = random.uniform(1e-3, 9e-3, CALLS)
        table = tuple(tuple((each * rows).tolist()) for rows in (1, 2, 4))
        kinds[name] = DeviceProfile(
            kind=name, rows=(1, 2, 4), forward=table, backward=table, spread=0.0
        )
    ends = {f"{a}>{b}" for a in devices for b in devices}
    link = Link(latency_seconds=1e-3, bytes_per_second=1e6)
    given = ps.Profile(
        fingerprint="0123456789abcdef",
        batch_size=4,
        devices=devices,
        kinds=kinds,
        labels=tuple(f"layer{k}" for k in range(CALLS)),
        weights=tuple(random.integers(100, 900, CALLS).tolist()),
        boundary=tuple(random.uniform(100, 2000, CALLS + 1).tolist()),
        forbidden={4: "no"},
        outputs=tuple(random.uniform(100, 900, CALLS).tolist()),
        states=tuple(random.integers(100, 900, CALLS).astype(float).tolist()),
        links=dict.fromkeys(ends, link) if links else {},
        tied=tuple(random.uniform(0, 3000, CALLS + 1).tolist()) if seed % 2 else (),
    )
    return msgspec.structs.replace(given, **changes)


def by_hand(found: ps.Profile, cuts: tuple[int, ...], count: int) -> tuple[float, float]:
    """Seconds of the busiest worker or link for a batch, and those of one micro-batch's way."""
    edges = [0, *cuts, CALLS]
    busiest, way = 0.0, 0.0
    for stage, (start, end) in enumerate(pairwise(edges)):
        device = found.devices[stage]
        rows = found.batch_size // count
        work = sum(found.on(device).seconds(rows)[0][start:end]) + found.overhead_seconds
        send = late = 0.0
        if stage < len(cuts) and found.links:
            link = found.links[f"{device}>{found.devices[stage + 1]}"]
            tied = found.tied[end] / count if found.tied else 0.0
            send = (found.boundary[end] * rows + tied) / link.bytes_per_second
            late = link.latency_seconds
        busy = max(work, send) if found.overlap else work + send
        busiest, way = max(busiest, count * busy), way + work + send + late
    return busiest, way


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("devices", [("cpu",) * 2, ("cpu",) * 3, ("cpu", "cuda:0", "cpu")])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_cut_is_the_best_of_all(seed: int, devices: tuple[str, ...], overlap: bool) -> None:
    profile = costs(devices, seed, overlap=overlap, overhead_seconds=2e-4)
    found = ps.plan(profile, num_microbatches=1, replicas=1, inference=True)
    places = [k for k in range(1, CALLS) if k not in profile.forbidden]
    every = {cuts: by_hand(profile, cuts, 1) for cuts in combinations(places, len(devices) - 1)}
    least = min(busiest for busiest, _ in every.values())
    best = min(way for busiest, way in every.values() if busiest <= least * (1 + 1e-9))
    assert found.predicted_step_seconds == pytest.approx(least)
    assert found.bound_seconds == pytest.approx(least)
    assert every[found.cuts] == pytest.approx((least, best))
    assert found.way_seconds == pytest.approx(best)


def test_training_cuts_one_micro_batch_anywhere_and_inference_does_not() -> None:
    profile = costs(links=False, seed=3)
    balanced = ps.plan(profile, num_microbatches=1, replicas=1, inference=True)
    training = ps.plan(profile, num_microbatches=1, replicas=1)
    busiest = [by_hand(profile, plan.cuts, 1)[0] for plan in (balanced, training)]
    assert busiest[0] < busiest[1]


def test_ties_are_broken_by_the_way_of_one_batch() -> None:
    """The first stage is the busiest in any case, as the second call takes no time there."""
    seconds = {"cpu": (20e-3, 0.0, 1e-3), "cuda:0": (20e-3, 5e-3, 1e-3)}
    kinds = {
        name: DeviceProfile(kind=name, rows=(1,), forward=(own,), backward=(own,), spread=0.0)
        for name, own in seconds.items()
    }
    profile = ps.Profile(
        fingerprint="0",
        batch_size=1,
        devices=("cpu", "cuda:0"),
        kinds=kinds,
        labels=tuple("abc"),
        weights=(0,) * 3,
        boundary=(0.0,) * 4,
        forbidden={},
    )
    found = ps.plan(profile, replicas=1, inference=True)
    assert found.cuts == (2,)
    assert found.predicted_step_seconds == pytest.approx(20e-3)
    assert found.way_seconds == pytest.approx(21e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_and_replicas_share_a_batch(count: int) -> None:
    profile = costs(("cpu",) * 4, seed=1)
    found = ps.plan(profile, num_microbatches=count, replicas=2, inference=True)
    assert (found.replicas, len(found.stages)) == (2, 2)
    one = msgspec.structs.replace(profile, devices=("cpu",) * 2, batch_size=2)
    alone = ps.plan(one, num_microbatches=count // 2, replicas=1, inference=True)
    assert found.cuts == alone.cuts
    assert found.predicted_step_seconds == pytest.approx(alone.predicted_step_seconds)
    with pytest.raises(ps.PlanError, match="2 replicas cannot share 1 micro-batches"):
        ps.plan(profile, num_microbatches=1, replicas=2, inference=True)


def test_all_kinds_are_compared() -> None:
    found = ps.plan(costs(("cpu",) * 4, seed=2), inference=True)
    kinds = {(c.way, c.replicas, c.stages) for c in found.considered}
    assert kinds >= {
        *(("pipeline", 1, 4), ("pipeline", 2, 2)),
        *(("data parallel", 4, 1), ("one device", 1, 1)),
    }
    least = min(c.seconds for c in found.considered if not c.only_compared)
    assert found.predicted_step_seconds <= 1.002 * least
    assert [c.why for c in found.considered].count("chosen") == 1
    split = ps.plan(costs(("cpu",) * 4, seed=2), replicas=1, inference=True)
    assert split.replicas == 1
    assert split.one_device_seconds is not None
    assert split.data_parallel_seconds is not None


def test_fewer_devices_where_others_only_cost() -> None:
    slow = Link(latency_seconds=1.0, bytes_per_second=1.0)
    profile = costs(("cpu", "cuda:0"), seed=4)
    links = dict.fromkeys(profile.links, slow)
    profile = msgspec.structs.replace(profile, links=links, one_replica="why")
    found = ps.plan(profile, inference=True)
    assert (found.way, len(found.devices)) == ("one device", 1)
    (on_all,) = plans_of_flow([profile], Request(inference=True), 1, Limits("why", True))
    assert len(on_all.devices) == 2
    assert on_all.note == "why"


def test_what_the_script_does_for_a_batch_is_the_least_that_it_takes() -> None:
    found = ps.plan(costs(pass_seconds=1.0), replicas=1, inference=True)
    assert found.predicted_step_seconds == found.bound_seconds == 1.0


# -- memory ---------------------------------------------------------------------------------------


def held(profile: ps.Profile, found: ps.Plan) -> list[float]:
    """Bytes of every stage: weights, states of a group more than stages, and activations."""
    rows, stages = profile.batch_size, len(found.stages)
    flying = 1 + stages
    every = []
    for stage in found.stages:
        start, end = stage.calls
        live = [profile.boundary[k] + profile.outputs[k] for k in range(start, end)]
        every.append(
            sum(profile.weights[start:end])
            + sum(profile.states[start:end]) * rows * (stages + 1)
            + max(live) * rows
            + (flying - 1) * profile.boundary[start] * rows
            + (profile.tied[start] if profile.tied else 0.0)
        )
    return every


def test_memory_is_weights_states_and_activations() -> None:
    profile = costs(seed=5)
    found = ps.plan(profile, num_microbatches=1, replicas=1, inference=True)
    assert [s.memory_bytes for s in found.stages] == pytest.approx(held(profile, found), abs=1)
    for stage in found.stages:
        states = sum(profile.states[slice(*stage.calls)]) * profile.batch_size * 3
        assert stage.state_bytes == pytest.approx(states)
    training = ps.plan(profile, num_microbatches=1, replicas=1)
    assert [s.state_bytes for s in training.stages] == [0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_cuts_elsewhere(seed: int) -> None:
    """The best cut of those that fit, as found by trying all."""
    profile = costs(("cpu",) * 3, seed, links=False)
    free = ps.plan(profile, num_microbatches=1, replicas=1, inference=True)
    places = [k for k in range(1, CALLS) if k not in profile.forbidden]
    every = [
        ps.plan(profile, num_microbatches=1, replicas=1, inference=True, cuts=cuts)
        for cuts in combinations(places, 2)
    ]
    peaks = [max(stage.memory_bytes for stage in plan.stages) for plan in every]
    limit = (min(peaks) + max(s.memory_bytes for s in free.stages)) // 2 + 1
    fitting = [plan for plan, peak in zip(every, peaks, strict=True) if peak <= limit]
    found = ps.plan(profile, num_microbatches=1, replicas=1, inference=True, memory_limit=limit)
    best = min(plan.predicted_step_seconds for plan in fitting)
    assert found.predicted_step_seconds == pytest.approx(best)
    assert found.memory_limit == limit
    assert max(stage.memory_bytes for stage in found.stages) <= limit
    assert found.bound_seconds == pytest.approx(free.predicted_step_seconds)


def test_a_limit_that_is_enough_without_states_and_not_with_them() -> None:
    profile = costs(seed=6)
    without = msgspec.structs.replace(profile, states=())
    peak = max(s.memory_bytes for s in ps.plan(without, replicas=1, inference=True).stages)
    limited: Any = {"replicas": 1, "inference": True, "memory_limit": peak}
    ps.plan(without, **limited)
    with pytest.raises(ps.PlanError, match=r"layer.* too little. Of these, .*states of 3 groups"):
        ps.plan(profile, **limited)
    states = [bytes_ / 100 for bytes_ in profile.states]
    small = msgspec.structs.replace(profile, states=tuple(states))
    ps.plan(small, **{**limited, "memory_limit": round(1.2 * peak)})


@pytest.mark.parametrize(("in_flight", "replicas", "each"), [(5, 1, 5), (1, 1, 1), (5, 2, 3)])
def test_groups_are_as_many_as_are_asked_for(in_flight: int, replicas: int, each: int) -> None:
    """Replicas share them, and what waits to enter a stage is of all that one has."""
    profile = costs(("cpu",) * 2 * replicas, seed=8)
    asked: Any = {"num_microbatches": 4, "replicas": replicas, "inference": True}
    found = ps.plan(profile, in_flight=in_flight, **asked)
    assert (found.in_flight, found.groups) == (in_flight, in_flight)
    for stage in found.stages:
        states = sum(profile.states[slice(*stage.calls)]) * each
        assert stage.state_bytes == pytest.approx(states, abs=1)
    usual = ps.plan(profile, **asked)
    assert usual.groups == 2 * replicas + 1
    assert sum(s.state_bytes for s in usual.stages) == pytest.approx(3 * sum(profile.states), abs=2)


def test_a_limit_that_is_enough_for_some_groups_and_not_for_more() -> None:
    profile = costs(seed=6)
    limited: Any = {"num_microbatches": 1, "replicas": 1, "inference": True}
    peak = max(s.memory_bytes for s in ps.plan(profile, in_flight=4, **limited).stages)
    ps.plan(profile, in_flight=4, memory_limit=peak, **limited)
    with pytest.raises(ps.PlanError, match=r"states of 40 groups .* a smaller in_flight="):
        ps.plan(profile, in_flight=40, memory_limit=peak, **limited)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"in_flight": 3}, "in_flight=3 is about states of sessions"),
        ({"in_flight": 0, "inference": True}, "in_flight=0 must be a positive integer"),
        ({"states": [1]}, r"states=\[1\] is about states of sessions"),
        ({"states": "hidden", "inference": True}, "is not a list; write states="),
    ],
)
def test_groups_and_states_that_mean_nothing(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ps.InputError, match=said):
        Request(**asked)


def test_a_group_is_a_micro_batch_if_that_is_asked_for() -> None:
    profile = costs(seed=7)
    whole = ps.plan(profile, replicas=1, inference=True)
    parts = ps.plan(profile, replicas=1, inference=True, num_microbatches=4)
    assert sum(s.state_bytes for s in whole.stages) == pytest.approx(
        4 * sum(s.state_bytes for s in parts.stages), rel=1e-3
    )


# -- what it says ---------------------------------------------------------------------------------


def test_it_says_what_it_is_for(tmp_path: Path) -> None:
    found = ps.plan(costs(), num_microbatches=2, replicas=1, inference=True)
    rate = f"{1 / found.predicted_step_seconds:.3g} batches a second"
    for text in (str(found), found.summary):
        assert "inference, 2 stages, 2 micro-batches of 2 rows: " in text
        assert f"a batch predicted in a steady flow, {rate} (" in text
    assert "states" in str(found)
    assert "backward" not in str(found)
    assert found.microbatches_per_second == 2 * found.batches_per_second
    found.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json") == found
    assert b'"inference": true' in (tmp_path / "plan.json").read_bytes()
    text = (tmp_path / "plan.json").read_text()
    older = text.replace('"inference": true,', "").replace('"way_seconds"', '"another"')
    (tmp_path / "plan.json").write_text(older)
    assert not ps.Plan.load(tmp_path / "plan.json").inference


def test_its_timeline_is_a_flow_of_forwards() -> None:
    found = ps.plan(costs(seed=1), num_microbatches=1, replicas=1, inference=True)
    timeline = found.timeline()
    assert {event.action.kind.value for event in timeline.events} == {"F"}
    assert len(timeline.events) == 2 * 4
    last = sorted(e.end for e in timeline.events if e.action.stage == 1)
    gaps = [after - before for before, after in pairwise(last)]
    assert gaps[-1] == pytest.approx(found.predicted_step_seconds)


@pytest.mark.parametrize(
    "asked", [{"schedule": "1f1b"}, {"recompute": "all"}, {"stages_per_worker": 2}]
)
def test_what_only_training_has_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ps.InputError, match="a plan for inference has forwards only"):
        ps.plan(costs(), inference=True, **asked)


def test_a_profile_without_backwards_is_for_inference_only() -> None:
    with pytest.raises(ps.InputError, match="the profile was measured for inference"):
        ps.plan(costs(inference=True))
    ps.plan(costs(inference=True), inference=True)


# -- on other machines ----------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_flow_on_the_machines_that_were_measured_is_the_plans_own(replicas: int) -> None:
    """With the profile and without it, also where a link is what is busiest."""
    devices = ("cpu",) * 2 * replicas
    for speed in (1e6, 1e4):
        profile = costs(devices, seed=9, overhead_seconds=1e-4)
        link = Link(latency_seconds=1e-3, bytes_per_second=speed)
        profile = msgspec.structs.replace(profile, links=dict.fromkeys(profile.links, link))
        asked: Any = {"num_microbatches": 2 * replicas, "replicas": replicas}
        found = ps.plan(profile, inference=True, **asked)
        size = found.microbatch_size
        case = WhatIf(len(devices), 2, size, replicas=replicas, batch=4, inference=True)
        planned = msgspec.structs.replace(found)
        for outcome in (what_if(profile, case), what_if_planned(planned, case)):
            assert outcome.step_seconds == pytest.approx(found.predicted_step_seconds)
            assert outcome.memory_bytes == max(s.memory_bytes for s in found.stages)
            assert outcome.stages == 2
            assert 0 < (outcome.efficiency or 0) <= 1


def test_a_flow_on_machines_that_are_others() -> None:
    profile = costs(seed=9, overlap=False)
    base = WhatIf(2, 2, 2, replicas=1, inference=True)
    seconds = what_if(profile, base).step_seconds or 0
    fast = what_if(profile, replace(base, speed=10.0, bandwidth=1e12)).step_seconds or 0
    assert fast < seconds / 8
    assert what_if(profile, replace(base, workers=4)).stages == 4
    few, many = (what_if(profile, replace(base, in_flight=n)).memory_bytes for n in (1, 9))
    assert few < many
    limit = Memory(limit=few)
    assert what_if(profile, replace(base, in_flight=1, memory=limit)).step_seconds
    short = what_if(profile, replace(base, in_flight=9, memory=limit))
    assert short.step_seconds is None
    assert short.note.startswith("does not fit the memory by ")
    plan = ps.plan(profile, num_microbatches=2, replicas=1, inference=True)
    with pytest.raises(ps.PlanError, match="for 3 groups in flight, and for 9 the model"):
        what_if_planned(plan, replace(base, in_flight=9))


def test_orders_of_more_devices_than_calls() -> None:
    """Replicas are possible, whatever a stage on each of them is."""
    devices = ("cpu",) * 4
    small = costs(devices, links=False)
    kind = small.on("cpu")
    lines = {n: tuple(line[:3] for line in getattr(kind, n)) for n in ("forward", "backward")}
    few = msgspec.structs.replace(
        small,
        kinds={"cpu": msgspec.structs.replace(kind, **lines)},
        forbidden={},
        labels=small.labels[:3],
        weights=small.weights[:3],
        boundary=small.boundary[:4],
        outputs=small.outputs[:3],
        states=small.states[:3],
        tied=(),
    )
    assert ps.plan(few, inference=True, any_order=True).devices


def test_more_replicas_than_rows_are_no_question_of_micro_batches() -> None:
    few = costs(("cpu",) * 4, batch_size=2)
    with pytest.raises(ps.PlanError, match="4 replicas cannot share 2 rows; give more"):
        ps.plan(few, inference=True, replicas=4)


def test_a_batch_has_a_row_for_every_micro_batch() -> None:
    with pytest.raises(ps.InputError, match="4"):
        what_if(costs(), WhatIf(2, 4, batch=2, replicas=1, inference=True))
