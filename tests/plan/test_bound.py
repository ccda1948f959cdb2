"""The lower bounds of a step."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plan.bound import schedule_bound, step_bound
from penstock.schedule import SCHEDULES, Costs, build
from tests.plan.exhaustive import every_schedule, step


def test_equal_stages_meet_the_gpipe_formula() -> None:
    p, m, work, c = 4, 8, 3.0, 0.25
    assert step_bound([work] * p, [c] * (p - 1), m) == (m + p - 1) * work + 2 * (p - 1) * c


def test_one_stage_is_one_device() -> None:
    assert step_bound([2.0], [], 5) == 10.0


def test_a_heavy_first_stage_hides_what_follows() -> None:
    assert step_bound([10.0, 1.0, 1.0], [0.5, 0.5], 4) == 40.0


def test_a_heavy_last_stage_waits_for_what_comes_before() -> None:
    assert step_bound([1.0, 2.0, 10.0], [0.5, 0.25], 4) == (1.0 + 1.0) + (2.0 + 0.5) + 40.0


def test_an_empty_latency_is_none() -> None:
    assert step_bound([1.0, 2.0], [], 3) == step_bound([1.0, 2.0], [0.0], 3)


@given(
    work=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    m=st.integers(1, 20),
)
def test_is_at_least_the_bottleneck_and_at_least_one_pass(work: list[int], m: int) -> None:
    bound = step_bound(work, [], m)
    assert bound >= m * max(work)
    assert bound >= sum(work)
    assert bound <= sum(work) + (m - 1) * max(work)


@pytest.mark.parametrize(
    ("work", "latency", "m", "message"),
    [
        ([], [], 4, "0 stages and num_microbatches=4"),
        ([1.0], [], 0, "1 stages and num_microbatches=0"),
        ([1.0, 1.0, 1.0], [0.1], 4, "3 stages have 2 links between them, but latency has 1"),
    ],
)
def test_arguments_that_do_not_fit(
    work: list[float], latency: list[float], m: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        step_bound(work, latency, m)


seconds = st.integers(0, 12).map(float)


@st.composite
def small_costs(draw: st.DrawFn, p: int, wires: bool = True) -> Costs:
    def some(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(seconds, min_size=count, max_size=count)))

    weight, rest = some(p), some(p)
    backward = tuple(a + b for a, b in zip(weight, rest, strict=True))
    transfer = some(p - 1) if wires else ()
    return Costs(some(p), backward, weight, some(p - 1), transfer)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    workers=st.integers(1, 4),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    data=st.data(),
)
def test_no_schedule_beats_the_bounds(
    name: str, workers: int, v: int, m: int, data: st.DataObject
) -> None:
    p, recipe = v * workers, SCHEDULES[name]
    assume(recipe.takes(p, workers))
    costs = data.draw(small_costs(p))
    schedule = build(name, p, m, num_workers=workers)
    split, homes = recipe.splits_backward, recipe.place(p, workers)
    taken = step(schedule, costs)
    assert schedule_bound(costs, m, homes, split=split) <= taken
    assert schedule_bound(costs, m, homes, split=True) <= taken


@given(p=st.integers(1, 6), m=st.integers(1, 9), data=st.data())
def test_is_never_below_the_simple_bound(p: int, m: int, data: st.DataObject) -> None:
    costs = data.draw(small_costs(p, wires=False))
    work = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    whole = schedule_bound(costs, m)
    assert whole >= step_bound(work, costs.latency, m)
    assert whole >= schedule_bound(costs, m, split=True)


# Whether the best of all schedules always takes what the bound says. Where it does, the bound
# cannot be improved.
@pytest.mark.parametrize(
    ("homes", "m", "split", "examples"),
    [
        ((0, 1), 1, False, 30),
        ((0, 1), 2, False, 40),
        ((0, 1), 4, False, 10),
        ((0, 1, 2), 2, False, 20),
        ((0, 1), 2, True, 20),
        ((0, 1, 0), 2, False, 20),
        ((0, 0, 1), 2, False, 20),
        ((0, 1, 0), 1, True, 20),
        ((0, 1, 0, 1), 1, False, 20),
    ],
)
def test_the_best_of_all_schedules_does_not_beat_it(
    homes: tuple[int, ...], m: int, split: bool, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(small_costs(len(homes)))
    def compare(costs: Costs) -> None:
        bound = schedule_bound(costs, m, homes, split=split)
        best = min(step(schedule, costs) for schedule in every_schedule(homes, m, split))
        assert bound <= best
        if homes == (0, 1) and not split:
            assert bound == best

    compare()


def test_halves_need_no_way_back_at_the_end() -> None:
    """The last stage can put off more than the way back takes."""
    costs = Costs((1.0, 4.0), (1.0, 12.0), (0.0, 8.0))
    assert schedule_bound(costs, 4) == 1 + 4 * 16 + 1
    assert schedule_bound(costs, 4, split=True) == 1 + 4 * 16


def test_an_early_stage_waits_for_what_comes_back() -> None:
    """Of the 22 s until the first micro-batch is back, the second one's forward fills 3."""
    assert step_bound([6.0, 2.0], [10.0], 2) == 6.0 + 20.0 + 4.0
    assert schedule_bound(Costs((3.0, 1.0), (3.0, 1.0), (), (10.0,)), 2) == 12.0 + 22.0 - 3.0


@pytest.mark.parametrize(("m", "homes"), [(0, (0, 1)), (4, (0, 1, 2))])
def test_a_placement_or_a_count_that_does_not_fit(m: int, homes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"num_microbatches={m} and {len(homes)} workers"):
        schedule_bound(Costs.equal(2, 1.0, 1.0, 1.0), m, homes)
