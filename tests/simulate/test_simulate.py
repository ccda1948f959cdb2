"""The simulator against two slower ones that spell the rules out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError, ScheduleError
from penstock.schedule import SCHEDULES, Action, Kind, Schedule, Timeline, build, placement_of
from penstock.simulate import Network, simulate

F, B = Kind.FORWARD, Kind.BACKWARD

ticks = st.integers(1, 20)
delays = st.integers(0, 20)


def equal_stages(forward: float, backward: float) -> Callable[[Action], float]:
    return lambda action: forward if action.kind is F else backward


@dataclass(frozen=True)
class Problem:
    """A schedule, what its actions take and what lies between its workers, in whole ticks."""

    schedule: Schedule
    homes: tuple[int, ...]
    seconds: dict[Action, int]
    network: Network


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any schedule, several stages per worker where it can, halves where it has them."""
    recipe = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    workers = draw(st.integers(1, 4))
    v = draw(st.sampled_from([v for v in (1, 2, 3) if recipe.takes(v * workers, workers)]))
    p, m = v * workers, draw(st.integers(1, 8))
    schedule = build(recipe.name, p, m, num_workers=workers)
    actions = [action for actions in schedule.workers for action in actions]
    return Problem(
        schedule,
        placement_of(recipe.name, p, workers),
        {action: draw(ticks) for action in actions},
        Network(
            latency=draw(st.lists(delays, min_size=p - 1, max_size=p - 1)),
            transfer=draw(st.lists(delays, min_size=p - 1, max_size=p - 1)),
            overlap=draw(st.booleans()),
            overhead=draw(st.integers(0, 3)),
        ),
    )


def starts(timeline: Timeline) -> dict[Action, float]:
    return {event.action: event.start for event in timeline.events}


@given(problems())
def test_agrees_with_a_fixpoint(problem: Problem) -> None:
    """Without queues for links, the starts are the least solution of inequalities."""
    schedule, homes, p = problem.schedule, problem.homes, problem.schedule.num_stages
    network = replace(problem.network, transfer=(), overlap=True)
    ends = dict.fromkeys(problem.seconds, 0.0)
    work = {action: ticks + network.overhead for action, ticks in problem.seconds.items()}

    def arrival(source: Action, stage: int) -> float:
        apart = homes[source.stage] != homes[stage]
        hop = network.latency[min(stage, source.stage)] if apart else 0.0
        return ends.get(source, 0.0) + hop if source in ends else 0.0

    def earliest(action: Action, previous: Action | None) -> float:
        kind, s, i = action
        bounds = [0.0, ends[previous] if previous else 0.0]
        if kind is F and s > 0:
            bounds.append(arrival(Action(F, s - 1, i), s))
        if kind is Kind.WEIGHT:
            bounds.append(ends[Action(Kind.INPUT, s, i)])
        if kind in (B, Kind.INPUT):
            bounds.append(ends[Action(F, s, i)])
            if s < p - 1:
                bounds += [arrival(Action(half, s + 1, i), s) for half in (B, Kind.INPUT)]
        return max(bounds)

    changed = True
    while changed:
        changed = False
        for actions in schedule.workers:
            for previous, action in zip((None, *actions), actions, strict=False):
                end = earliest(action, previous) + work[action]
                changed |= end != ends[action]
                ends[action] = end
    found = starts(simulate(schedule, problem.seconds.__getitem__, network))
    assert found == {action: end - work[action] for action, end in ends.items()}


@given(problems())
def test_agrees_with_a_ticking_clock(problem: Problem) -> None:
    """At each tick, values arrive, links take the next value, workers look at their next action."""
    timeline = simulate(problem.schedule, problem.seconds.__getitem__, problem.network)
    assert starts(timeline) == Clock(problem).run()


@dataclass
class Link:
    """One direction between two workers: a queue of `(what, transfer, latency)`."""

    waiting: deque[tuple[Action, int, int]] = field(default_factory=deque)
    busy_until: int = 0


class Clock:
    """A simulator that knows nothing but what holds now."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.lists = [deque(actions) for actions in problem.schedule.workers]
        self.running: list[tuple[int, Action] | None] = [None for _ in self.lists]
        self.links: dict[tuple[int, int], Link] = {}
        self.arrivals: dict[tuple[Kind, int, int], int] = {}
        self.starts: dict[Action, float] = {}

    def run(self) -> dict[Action, float]:
        now = 0
        while any(self.lists):
            for worker, running in enumerate(self.running):
                if running and running[0] == now:
                    self.running[worker] = None
                    self.send(running[1], now)
            for link in self.links.values():
                while link.waiting and link.busy_until <= now:
                    action, transfer, latency = link.waiting.popleft()
                    link.busy_until = now + transfer
                    self.arrive(action, now + transfer + latency)
            for worker, actions in enumerate(self.lists):
                if self.running[worker] or not actions or self.is_sending(worker, now):
                    continue
                if self.arrivals.get(self.need(actions[0]), now + 1) <= now:
                    action = actions.popleft()
                    self.starts[action] = now
                    end = now + self.problem.seconds[action] + int(self.problem.network.overhead)
                    self.running[worker] = end, action
            now += 1
        return self.starts

    def need(self, action: Action) -> tuple[Kind, int, int]:
        """What has to have arrived; forwards of stage 0 need nothing, and whole means input too."""
        kind, stage, microbatch = action
        if kind is F and stage == 0:
            self.arrivals[F, 0, microbatch] = 0
        return (Kind.INPUT if kind is B else kind, stage, microbatch)

    def send(self, action: Action, now: int) -> None:
        kind, stage, microbatch = action
        if kind is Kind.WEIGHT:
            return
        if kind is not F:
            self.arrivals[Kind.WEIGHT, stage, microbatch] = now
        last = stage == self.problem.schedule.num_stages - 1
        target = stage + (not last) if kind is F else stage - 1
        if target < 0:
            return
        pair = self.problem.homes[stage], self.problem.homes[target]
        if pair[0] == pair[1]:
            self.arrive(action, now)
            return
        hop = min(stage, target)
        network = self.problem.network
        entry = (action, int(network.transfer[hop]), int(network.latency[hop]))
        self.links.setdefault(pair, Link()).waiting.append(entry)

    def arrive(self, action: Action, when: int) -> None:
        kind, stage, microbatch = action
        if kind is not F:
            self.arrivals[Kind.INPUT, stage - 1, microbatch] = when
        elif stage == self.problem.schedule.num_stages - 1:
            self.arrivals[Kind.INPUT, stage, microbatch] = when
        else:
            self.arrivals[F, stage + 1, microbatch] = when

    def is_sending(self, worker: int, now: int) -> bool:
        """Whether it waits for a link to take what it sends."""
        if self.problem.network.overlap:
            return False
        return any(
            source == worker and (link.waiting or link.busy_until > now)
            for (source, _), link in self.links.items()
        )


def test_hops_between_the_same_two_workers_share_a_link() -> None:
    """Stages 0 and 2 of one worker both send to the other, which has 1 and 3."""
    schedule = build("breadth-first", 4, 2, num_workers=2)
    network = Network(transfer=(10.0, 0.0, 1.0))
    found = starts(simulate(schedule, equal_stages(1.0, 1.0), network))
    assert found[Action(F, 1, 0)] == 11.0
    assert found[Action(F, 1, 1)] == 21.0  # the first occupies the link until 11
    assert found[Action(F, 2, 0)] == 12.0
    assert found[Action(F, 3, 0)] == 22.0  # made at 13, but the second goes first


def test_a_sender_that_does_not_overlap_waits_for_its_link() -> None:
    schedule = build("gpipe", 2, 2)
    network = Network(transfer=(2.0,), overlap=False)
    found = starts(simulate(schedule, equal_stages(1.0, 1.0), network))
    assert found[Action(F, 0, 1)] == 3.0
    overlapped = starts(simulate(schedule, equal_stages(1.0, 1.0), replace(network, overlap=True)))
    assert overlapped[Action(F, 0, 1)] == 1.0


def test_negative_times_are_an_error() -> None:
    with pytest.raises(InputError, match=r"cannot be negative, got -0\.5"):
        Network(latency=(1.0, -0.5))


@pytest.mark.slow
def test_a_million_actions_are_each_looked_at_once() -> None:
    """What a quadratic simulation would not finish in the time that a test has."""
    schedule = build("1f1b", 4096, 128)
    asked = Counter[Action]()

    def seconds(action: Action) -> float:
        asked[action] += 1
        return 1.0

    timeline = simulate(schedule, seconds, Network(transfer=(0.1,) * 4095))
    assert len(timeline.events) == len(asked) == 2 * 4096 * 128
    assert set(asked.values()) == {1}


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
