"""The order of forwards alone, and of backwards alone."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from penstock.errors import ScheduleError
from penstock.plan import Plan, passes
from penstock.plan.decisions import StagePlan
from penstock.plan.passes import _WORTH, _seconds, schedule_of_pass
from penstock.schedule import SCHEDULES, Action, Kind, Rules, Schedule, check, placement_of
from penstock.simulate import Network, Simulator

PASSES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def plan_of(
    schedule: str,
    placement: tuple[int, ...],
    count: int,
    seconds: tuple[tuple[float, float, float], ...],
    rules: Rules | None = None,
    latency: float = 0.1,
    **options: Any,
) -> Plan:
    """A plan of stages with these seconds of forwards, backwards and weight halves."""
    stages = tuple(
        StagePlan(
            worker=worker,
            device="cpu",
            calls=(k, k + 1),
            first="",
            last="",
            weight_bytes=0,
            input_bytes=0,
            forward_seconds=seconds[k][0],
            backward_seconds=seconds[k][1],
            weight_seconds=seconds[k][2],
            latency_seconds=latency if k else 0.0,
            transfer_seconds=latency / 2 if k else 0.0,
        )
        for k, worker in enumerate(placement)
    )
    return Plan(
        fingerprint="",
        batch_size=count,
        num_microbatches=count,
        schedule=schedule,
        stages=stages,
        predicted_step_seconds=1.0,
        bound_seconds=1.0,
        one_device_seconds=None,
        rules=rules,
        **options,
    )


def any_plan(dice: random.Random) -> Plan:
    """Of any schedule, with stages that are not equal."""
    workers, each = dice.randint(1, 4), dice.randint(1, 4)
    schedule = dice.choice(sorted(SCHEDULES))
    if schedule == "zero-bubble-v":
        each = 2
    elif schedule not in ("fitted", "interleaved", "breadth-first"):
        each = 1
    stages, rules = workers * each, None
    placement = tuple(k % workers for k in range(stages))
    if schedule == "fitted":
        dice.shuffle(order := list(placement))
        placement, rules = tuple(order), Rules.eager(stages, split=dice.random() < 0.5)
    else:
        placement = placement_of(schedule, stages, workers)
    seconds = tuple((dice.random(), 1 + dice.random(), dice.random()) for _ in range(stages))
    return plan_of(
        schedule,
        placement,
        dice.randint(1, 9),
        seconds,
        rules,
        overlap=dice.random() < 0.5,
        overhead_seconds=dice.choice([0.0, 0.1]),
    )


def part(schedule: Schedule, what: str) -> Schedule:
    """The forwards of a schedule, or the backwards."""
    workers = tuple(
        tuple(a for a in actions if (a.kind is Kind.FORWARD) is (what == "forward"))
        for actions in schedule.workers
    )
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, workers)


def test_both_passes_are_a_sound_schedule_and_never_slower_than_the_schedules_own() -> None:
    dice, gains = random.Random(1), []
    for _ in range(300):
        plan = any_plan(dice)
        whole = plan.schedule_for(plan.num_microbatches)
        found = [schedule_of_pass(plan, plan.num_microbatches, what) for what in PASSES]
        both = tuple((*a, *b) for a, b in zip(*(one.workers for one in found), strict=True))
        step = Schedule("both", whole.num_stages, whole.num_microbatches, both)
        halves = check(step).splits_backward
        assert halves is check(whole).splits_backward
        assert check(step).placement == plan.placement
        for what, one in zip(PASSES, found, strict=True):
            own = part(whole, what)
            before, after = (_seconds(plan, each, what == "forward") for each in (own, one))
            assert one == own or after < _WORTH * before
            gains.append(before / after)
    assert max(gains) > 1.3
    assert sum(gain > 1 for gain in gains) > 60


def ahead(plan: Plan, found: Schedule) -> list[int]:
    """How many forwards of each stage have begun more than of the next one, at most."""
    simulator = Simulator(found)
    durations = [plan.costs.seconds(action) for action in simulator.actions]
    starts, _ = simulator.times(durations, Network.of(plan.costs))
    begun, most = [0] * found.num_stages, [0] * found.num_stages
    for _, stage in sorted((t, -a.stage) for t, a in zip(starts, simulator.actions, strict=True)):
        begun[-stage] += 1
        for k in range(found.num_stages - 1):
            most[k] = max(most[k], begun[k] - begun[k + 1])
    return most


def put_off(plan: Plan, found: Schedule) -> list[int]:
    """How many weight halves of each stage are waiting, at most."""
    waiting, most = [0] * found.num_stages, [0] * found.num_stages
    for actions in found.workers:
        for kind, stage, _ in actions:
            waiting[stage] += {Kind.INPUT: 1, Kind.WEIGHT: -1}.get(kind, 0)
            most[stage] = max(most[stage], waiting[stage])
    return most


def test_no_stage_is_much_further_ahead_than_in_a_step() -> None:
    """Or what waits for other stages, or for weight halves, would take more memory.

    An order does not say when: a worker that has nothing else to do begins before it has to.
    """
    dice, changed = random.Random(6), [0, 0]
    for _ in range(150):
        plan = replace(any_plan(dice), overlap=True, overhead_seconds=0.0)
        whole = plan.schedule_for(60)
        allowed = check(whole).in_flight
        for k, (what, far) in enumerate(zip(PASSES, (ahead, put_off), strict=True)):
            found = schedule_of_pass(plan, 60, what)
            if found != part(whole, what):
                changed[k] += 1
                assert sum(far(plan, found)) <= 1.5 * sum(allowed)
    assert min(changed) > 10


def test_a_worker_with_nothing_to_choose_keeps_its_order() -> None:
    seconds = ((1.0, 2.0, 0.0), (3.0, 1.0, 0.0), (1.0, 2.0, 0.0))
    plan = plan_of("1f1b", (0, 1, 2), 4, seconds)
    for what in PASSES:
        assert schedule_of_pass(plan, 4, what) == part(plan.schedule_for(4), what)


def test_equal_stages_keep_the_order_of_a_schedule_that_is_made_for_them() -> None:
    plan = plan_of("interleaved", (0, 1, 0, 1), 8, ((1.0, 2.0, 0.0),) * 4, latency=0.0)
    for what in PASSES:
        assert schedule_of_pass(plan, 8, what) == part(plan.schedule_for(8), what)


def test_a_fraction_of_a_percent_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(2)
    plans = [any_plan(dice) for _ in range(100)]

    def changed() -> int:
        return sum(
            schedule_of_pass(plan, plan.num_microbatches, what)
            != part(plan.schedule_for(plan.num_microbatches), what)
            for plan, what in product(plans, PASSES)
        )

    some = changed()
    monkeypatch.setattr(passes, "_WORTH", 1.0)
    assert changed() > some > 0


def orders(stages: tuple[int, ...], count: int, kind: Kind) -> list[tuple[Action, ...]]:
    """All orders of a worker with two stages."""
    one, other = stages
    found = []
    for places in combinations(range(2 * count), count):
        numbers = {one: iter(range(count)), other: iter(range(count))}
        chosen = [one if k in places else other for k in range(2 * count)]
        found.append(tuple(Action(kind, stage, next(numbers[stage])) for stage in chosen))
    return found


@pytest.mark.parametrize("what", PASSES)
def test_it_is_close_to_the_best_of_all_orders(what: Literal["forward", "backward"]) -> None:
    dice, count, excess = random.Random(3), 3, []
    kind = Kind.FORWARD if what == "forward" else Kind.BACKWARD
    for _ in range(10):
        seconds = tuple((dice.random(), dice.random(), 0.0) for _ in range(4))
        plan = plan_of("interleaved", (0, 1, 0, 1), count, seconds, overhead_seconds=0.01)
        best = float("inf")
        for lists in product(orders((0, 2), count, kind), orders((1, 3), count, kind)):
            try:
                tried = _seconds(plan, Schedule("", 4, count, lists), what == "forward")
            except ScheduleError:  # they wait for each other
                continue
            best = min(best, tried)
        found = _seconds(plan, schedule_of_pass(plan, count, what), what == "forward")
        excess.append(found / best - 1)
    assert min(excess) >= -1e-9
    assert sum(excess) / len(excess) < 0.03


def test_other_replicas_have_the_order_of_the_first() -> None:
    plan = any_plan(random.Random(5))
    slower = tuple(replace(stage, forward_seconds=9.0) for stage in plan.stages)
    other = replace(plan, other_replicas=(plan.devices,), other_stages=(slower,))
    for what in PASSES:
        assert schedule_of_pass(plan, 4, what) == schedule_of_pass(other, 4, what)
