"""The simulator against the formulas of the literature and against two slower simulators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError, ScheduleError
from penstock.plan.bound import step_bound
from penstock.schedule import SCHEDULES, Action, Kind, Schedule, Timeline, build
from penstock.simulate import simulate

F, B = Kind.FORWARD, Kind.BACKWARD

names = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 6)
microbatches = st.integers(1, 10)
# Quarters are exact in binary, so equal means equal.
positive = st.integers(1, 40).map(lambda quarters: quarters / 4)
quarters = st.integers(0, 40).map(lambda quarters: quarters / 4)


def equal_stages(forward: float, backward: float) -> Callable[[Action], float]:
    return lambda action: forward if action.kind is F else backward


@st.composite
def unequal_pipelines(draw: st.DrawFn) -> tuple[Schedule, dict[Action, float], list[float]]:
    p, m = draw(stages), draw(microbatches)
    cost = {(kind, stage): draw(quarters) for kind in (F, B) for stage in range(p)}
    schedule = build(draw(names), p, m)
    seconds = {
        action: cost[action.kind, action.stage]
        for actions in schedule.workers
        for action in actions
    }
    return schedule, seconds, draw(st.lists(quarters, min_size=p - 1, max_size=p - 1))


def times(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    return {event.action: (event.start, event.end) for event in timeline.events}


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_naive_formula(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("naive", p, m), equal_stages(f, b), [c] * (p - 1)).seconds
    assert step == m * p * (f + b) + 2 * m * (p - 1) * c


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_gpipe_formula(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("gpipe", p, m), equal_stages(f, b), [c] * (p - 1)).seconds
    assert step == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_1f1b_formula(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("1f1b", p, m), equal_stages(f, b), [c] * (p - 1)).seconds
    round_trips = (p - 1) + (m - 1) - math.ceil((m - 1) / p)
    assert step == (m + p - 1) * (f + b) + 2 * c * round_trips


@given(p=st.integers(2, 6), rounds=st.integers(1, 4), f=positive, b=positive, c=quarters)
def test_1f1b_formula_in_whole_rounds(p: int, rounds: int, f: float, b: float, c: float) -> None:
    """Where `p` divides `m` the formula takes the form known from the literature."""
    m = rounds * p
    step = simulate(build("1f1b", p, m), equal_stages(f, b), [c] * (p - 1)).seconds
    assert step == (m + p - 1) * (f + b) + c * (2 * rounds * (p - 1) + 2 * (p - 2))


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_eager_1f1b_formula(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("eager-1f1b", p, m), equal_stages(f, b), [c] * (p - 1)).seconds
    hidden = (m + p - 1) * (f + b) + 2 * (p - 1) * c
    assert step == hidden if 2 * c <= f + b else step >= hidden


@given(unequal_pipelines())
def test_no_schedule_beats_the_bound(
    pipeline: tuple[Schedule, dict[Action, float], list[float]],
) -> None:
    schedule, seconds, latency = pipeline
    work = [
        seconds[Action(F, stage, 0)] + seconds[Action(B, stage, 0)]
        for stage in range(schedule.num_stages)
    ]
    bound = step_bound(work, latency, schedule.num_microbatches)
    assert simulate(schedule, seconds.__getitem__, latency).seconds >= bound


@given(unequal_pipelines())
def test_agrees_with_a_fixpoint(
    pipeline: tuple[Schedule, dict[Action, float], list[float]],
) -> None:
    """The start times are the least solution of the inequalities, found by brute iteration."""
    schedule, seconds, latency = pipeline
    p = schedule.num_stages
    ends = dict.fromkeys(seconds, 0.0)

    def earliest(action: Action, previous: Action | None) -> float:
        kind, s, i = action
        bounds = [0.0, ends[previous] if previous else 0.0]
        if kind is F and s > 0:
            bounds.append(ends[Action(F, s - 1, i)] + latency[s - 1])
        if kind is B:
            bounds.append(ends[Action(F, s, i)])
        if kind is B and s < p - 1:
            bounds.append(ends[Action(B, s + 1, i)] + latency[s])
        return max(bounds)

    changed = True
    while changed:
        changed = False
        for actions in schedule.workers:
            for previous, action in zip((None, *actions), actions, strict=False):
                end = earliest(action, previous) + seconds[action]
                changed |= end != ends[action]
                ends[action] = end
    found = times(simulate(schedule, seconds.__getitem__, latency))
    assert found == {action: (end - seconds[action], end) for action, end in ends.items()}


@given(pipeline=unequal_pipelines())
def test_agrees_with_a_ticking_clock(
    pipeline: tuple[Schedule, dict[Action, float], list[float]],
) -> None:
    """Everything lasts whole ticks, and at each tick every worker looks at its next action."""
    schedule, seconds, latency = pipeline
    ticks = {action: int(4 * value) + 1 for action, value in seconds.items()}
    hops = [int(4 * value) for value in latency]
    starts = tick_by_tick(schedule, ticks, hops)
    timeline = simulate(schedule, ticks.__getitem__, hops)
    assert {action: start for action, (start, _) in times(timeline).items()} == starts


def tick_by_tick(
    schedule: Schedule, ticks: dict[Action, int], hops: list[int]
) -> dict[Action, int]:
    p = schedule.num_stages
    starts: dict[Action, int] = {}

    def arrived(source: Action, hop: int, now: int) -> bool:
        return source in starts and starts[source] + ticks[source] + hop <= now

    def ready(action: Action, now: int) -> bool:
        kind, s, i = action
        if kind is F:
            return s == 0 or arrived(Action(F, s - 1, i), hops[s - 1], now)
        if s == p - 1:
            return arrived(Action(F, s, i), 0, now)
        return arrived(Action(B, s + 1, i), hops[s], now)

    lists = [list(actions) for actions in schedule.workers]
    busy_until = [0] * len(lists)
    now = 0
    while any(lists):
        for worker, actions in enumerate(lists):
            if actions and busy_until[worker] <= now and ready(actions[0], now):
                action = actions.pop(0)
                starts[action] = now
                busy_until[worker] = now + ticks[action]
        now += 1
    return starts


def test_events_carry_worker_start_and_end() -> None:
    timeline = simulate(build("gpipe", 2, 1), equal_stages(1.0, 2.0), [0.5])
    assert [
        (event.worker, str(event.action), event.start, event.end) for event in timeline.events
    ] == [
        (0, "F0.0", 0.0, 1.0),
        (1, "F1.0", 1.5, 2.5),
        (1, "B1.0", 2.5, 4.5),
        (0, "B0.0", 5.0, 7.0),
    ]
    assert timeline.num_workers == 2
    assert timeline.seconds == 7.0
    assert timeline.busy() == (3.0, 3.0)


def test_no_latency_between_stages_of_one_worker() -> None:
    both = (Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0))
    schedule = Schedule("by hand", 2, 1, (both,))
    assert simulate(schedule, equal_stages(1.0, 1.0), [100.0]).seconds == 4.0


def test_every_duration_is_asked_once() -> None:
    asked: list[Action] = []

    def seconds(action: Action) -> float:
        asked.append(action)
        return 1.0

    schedule = build("1f1b", 4, 6)
    simulate(schedule, seconds)
    assert sorted(asked) == sorted(action for actions in schedule.workers for action in actions)


def test_a_latency_too_few_is_an_error() -> None:
    with pytest.raises(InputError, match="3 stages have 2 links between them, but latency has 1"):
        simulate(build("gpipe", 3, 2), equal_stages(1.0, 1.0), [0.1])


def test_a_deadlock_is_an_error() -> None:
    lists = ((Action(B, 0, 0), Action(F, 0, 0)),)
    with pytest.raises(ScheduleError, match=r"stuck on B0\.0"):
        simulate(Schedule("by hand", 1, 1, lists), equal_stages(1.0, 1.0))
