"""The list scheduler: sound whatever the costs and the rules, and faithful to the rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError, ScheduleError
from penstock.schedule import Action, Costs, Kind, Rules, build, check, draw
from penstock.simulate import Network, simulate

seconds = st.integers(0, 12).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, int, tuple[int, ...], Rules]:
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 8))

    def some(value: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(value, min_size=count, max_size=count)))

    weight, rest = some(seconds, p), some(seconds, p)
    costs = Costs(
        forward=some(seconds, p),
        backward=tuple(a + b for a, b in zip(weight, rest, strict=True)),
        weight=weight,
        latency=some(seconds, p - 1),
        transfer=some(seconds, p - 1),
    )
    workers = draw(st.integers(1, p))
    homes = tuple(
        draw(st.permutations([*range(workers), *(s % workers for s in range(workers, p))]))
    )
    split = draw(st.booleans())
    rules = Rules(
        in_flight=tuple(draw(st.lists(st.integers(1, m + 1), min_size=p, max_size=p))),
        lead=tuple(draw(st.lists(st.integers(0, m), min_size=p, max_size=p))),
        patience=draw(st.sampled_from([0.0, 0.5, 1.0])),
        split=split,
        deepest_first=draw(st.booleans()),
        from_the_end=not split and draw(st.booleans()),
    )
    return costs, m, homes, rules


@given(problems())
def test_is_sound_and_keeps_to_its_rules(
    problem: tuple[Costs, int, tuple[int, ...], Rules],
) -> None:
    costs, m, homes, rules = problem
    schedule = build("fitted", len(homes), m, costs=costs, placement=homes, rules=rules)
    proof = check(schedule)
    assert proof.placement == homes
    assert proof.splits_backward == rules.split
    assert all(held <= most for held, most in zip(proof.in_flight, rules.in_flight, strict=True))
    again = build("fitted", len(homes), m, costs=costs, placement=homes, rules=rules)
    assert again == schedule


@given(problems())
def test_nobody_waits_who_could_work(problem: tuple[Costs, int, tuple[int, ...], Rules]) -> None:
    """Without limits, nothing that a worker runs after a pause could have started before it."""
    costs, m, homes, rules = problem
    p = len(homes)
    costs = replace(costs, transfer=())
    rules = Rules((m,) * p, rules.lead, deepest_first=rules.deepest_first)
    schedule = build("fitted", p, m, costs=costs, placement=homes, rules=rules)
    timeline = simulate(schedule, costs.seconds, Network.of(costs))
    ends = {event.action: event.end for event in timeline.events}

    def possible(kind: Kind, stage: int, microbatch: int) -> float:
        back = kind is Kind.BACKWARD
        source = stage + 1 if back else stage - 1
        if source == p:
            return ends[Action(Kind.FORWARD, stage, microbatch)]
        if source < 0:
            return 0.0
        hop = costs.latency[min(stage, source)] if homes[stage] != homes[source] else 0.0
        return ends[Action(kind, source, microbatch)] + hop

    for worker in range(len(schedule.workers)):
        # From the last to the first, so that `rest` is what was still to come.
        rest = float("inf")
        own = [event for event in timeline.events if event.worker == worker]
        for before, event in reversed(list(pairwise([None, *own]))):
            assert event is not None
            rest = min(rest, possible(*event.action))
            pause_began = before.end if before else 0.0
            assert event.start == pause_began or rest >= event.start


def test_equal_stages_give_eager_1f1b() -> None:
    assert draw(build("fitted", 3, 4)) == draw(build("eager-1f1b", 3, 4))


def test_waiting_a_little_for_something_better() -> None:
    """Stage 1 can start a backward of 3 s just before a forward comes that stage 2 needs."""
    costs = Costs((2.0, 1.0, 1.0), (1.0, 8.0, 1.0))
    orders = []
    for patience in (0.0, 1.0):
        rules = Rules((4, 4, 4), (4, 4, 4), patience)
        schedule = build("fitted", 3, 4, costs=costs, rules=rules)
        orders.append([str(action) for action in schedule.workers[1]])
    assert orders[0][:4] == ["F1.0", "F1.1", "B1.0", "F1.2"]
    assert orders[1][:4] == ["F1.0", "F1.1", "F1.2", "F1.3"]


def test_from_the_end_is_the_mirror() -> None:
    costs = Costs((1.0, 2.0), (3.0, 5.0), (), (0.5,))
    mirror = Costs(costs.backward, costs.forward, (), costs.latency)
    rules = Rules((3, 3), (2, 1))
    there = build("fitted", 2, 5, costs=costs, rules=rules)
    back = build("fitted", 2, 5, costs=mirror, rules=Rules((3, 3), (2, 1), from_the_end=True))
    kinds = {Kind.FORWARD: Kind.BACKWARD, Kind.BACKWARD: Kind.FORWARD}
    for one, other in zip(there.workers, back.workers, strict=True):
        assert [(kinds[k], s, 4 - i) for k, s, i in reversed(one)] == list(other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules((1, 1), (1,)), "2 entries and lead 1"),
        (lambda: Rules((1, 0), (1, 1)), r"in_flight=\(1, 0\)"),
        (lambda: Rules((1,), (1,), split=True, from_the_end=True), "not both"),
        (lambda: build("fitted", 2, 2, rules=Rules((1,), (1,))), "costs are of 2 stages.*have 1;"),
        (lambda: build("fitted", 2, 2, costs=Costs.equal(3, 1, 1, 1)), "of 3 stages, but num_st"),
        (lambda: build("fitted", 2, 2, placement=(0, 1, 2)), "placement has 3 entries"),
    ],
)
def test_what_does_not_fit(make: object, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "at least one stage"),
        (((1.0,), (1.0, 2.0)), "got 1, 2 and 0"),
        (((1.0,), (-1.0,)), "cannot be negative, got -1.0"),
        (((1.0,), (1.0,), (2.0,)), "weight=2.0 and backward=1.0"),
        (((1.0, 1.0), (1.0, 1.0), (), (0.1, 0.1)), "1 links between them, but latency has 2"),
    ],
)
def test_costs_that_do_not_fit(arguments: tuple[tuple[float, ...], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Costs(*arguments)


def test_costs_by_action() -> None:
    costs = Costs((1.0, 2.0), (3.0, 5.0), (0.5, 4.0))
    found = [costs.seconds(Action(kind, 1, 7)) for kind in Kind]
    assert found == [2.0, 5.0, 1.0, 4.0]
    assert Costs((1.0,), (3.0,)).seconds(Action(Kind.WEIGHT, 0, 0)) == 0.0


@pytest.mark.parametrize(
    ("deepest_first", "order"), [(True, "0 0 2 2 0 2"), (False, "0 0 0 2 2 2")]
)
def test_which_forwards_come_first_on_a_worker_with_several_stages(
    deepest_first: bool, order: str
) -> None:
    """After two forwards of stage 0, stage 2 could go on with the first of them."""
    costs = Costs((1.0, 0.5, 1.0), (1.0, 1.0, 1.0))
    rules = Rules((3, 3, 3), (3, 3, 3), deepest_first=deepest_first)
    schedule = build("fitted", 3, 3, costs=costs, placement=(0, 1, 0), rules=rules)
    forwards = [a.stage for a in schedule.workers[0] if a.kind is Kind.FORWARD]
    assert " ".join(map(str, forwards)) == order
