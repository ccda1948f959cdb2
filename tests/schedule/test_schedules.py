"""The schedules: sound for every size, and as frugal as they promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import InputError, ScheduleError
from penstock.schedule import SCHEDULES, Action, Costs, Kind, build, check, placement_of

F = Kind.FORWARD

PROMISED_IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "naive": lambda p, m, s: 1,
    "gpipe": lambda p, m, s: m,
    "1f1b": lambda p, m, s: min(m, p - s),
    "eager-1f1b": lambda p, m, s: min(m, 2 * (p - s) - 1),
    "interleaved": lambda p, m, s: min(m, p - s),
    "breadth-first": lambda p, m, s: m,
    "zero-bubble": lambda p, m, s: min(m, p),
}
"""By schedule: the micro-batches in flight at stage `s` with one stage per worker."""

stages = st.integers(1, 6)
microbatches = st.integers(1, 10)


@given(name=st.sampled_from(sorted(PROMISED_IN_FLIGHT)), p=stages, m=microbatches)
def test_holds_what_it_promises(name: str, p: int, m: int) -> None:
    proof = check(build(name, p, m))
    assert proof.in_flight == tuple(PROMISED_IN_FLIGHT[name](p, m, s) for s in range(p))
    assert proof.placement == tuple(range(p))


@given(name=st.sampled_from(sorted(SCHEDULES)), workers=stages, v=st.integers(1, 4), m=microbatches)
def test_is_sound_for_every_size_that_it_takes(name: str, workers: int, v: int, m: int) -> None:
    recipe = SCHEDULES[name]
    p = workers * v
    assume(recipe.takes(p, workers))
    schedule = build(name, p, m, num_workers=workers)
    proof = check(schedule)
    assert proof.placement == recipe.place(p, workers) == placement_of(name, p, workers)
    assert proof.splits_backward == recipe.splits_backward
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, p, m)


@given(workers=stages, m=st.integers(1, 30))
def test_zero_bubble_v_holds_what_the_first_worker_of_1f1b_would(workers: int, m: int) -> None:
    for actions in build("zero-bubble-v", 2 * workers, m).workers:
        changes = accumulate({F: 1, Kind.INPUT: 0, Kind.WEIGHT: -1}[a.kind] for a in actions)
        assert max(changes) <= 2 * workers


@given(workers=stages, v=st.integers(2, 4), m=st.integers(1, 30))
def test_interleaved_holds_few_groups(workers: int, v: int, m: int) -> None:
    """As in the paper for multiples of the workers; else a group is larger, below twice that."""
    largest = -(-m // max(1, m // workers))
    for worker, actions in enumerate(
        build("interleaved", v * workers, m, num_workers=workers).workers
    ):
        peak = max(accumulate(1 if a.kind is F else -1 for a in actions))
        assert peak <= (v - 1) * largest + 2 * (workers - 1 - worker) + 1


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"zero-bubble-v"}))
def test_one_stage_needs_no_pipeline(name: str) -> None:
    actions = build(name, 1, 3).workers[0]
    backwards = [a.microbatch for a in actions if a.kind in (Kind.BACKWARD, Kind.INPUT)]
    assert backwards == [0, 1, 2]
    assert len(actions) == (9 if name == "zero-bubble" else 6)


@pytest.mark.parametrize(
    ("name", "p", "workers", "message"),
    [
        ("1f1b", 4, 2, r"1f1b gives every worker exactly one stage.* do: 4$"),
        ("interleaved", 6, 4, r"equally many stages.*6 stages on 4 workers.* do: 1, 2, 3, 6$"),
        ("zero-bubble-v", 8, 2, r"exactly two stages.*8 stages on 2 workers.* do: 4$"),
        ("zero-bubble-v", 5, None, r"5 stages on 2 workers; .*even number.*6 for example$"),
        ("interleaved", 6, 0, "6 stages on 0 workers"),
    ],
)
def test_stages_that_cannot_be_shared_out(
    name: str, p: int, workers: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, p, 4, num_workers=workers)
    with pytest.raises(ScheduleError, match=message):
        placement_of(name, p, workers)


def test_the_natural_number_of_workers() -> None:
    assert len(build("interleaved", 4, 2).workers) == 4
    assert len(build("zero-bubble-v", 4, 2).workers) == 2
    assert placement_of("interleaved", 6, 3) == (0, 1, 2, 0, 1, 2)
    assert placement_of("zero-bubble-v", 6) == (0, 1, 2, 2, 1, 0)


def test_an_option_for_another_schedule() -> None:
    with pytest.raises(ScheduleError, match="gpipe takes no warmup; eager-1f1b does"):
        build("gpipe", 2, 2, warmup=3)


@given(p=stages, m=microbatches, warmup=st.integers(0, 5))
def test_a_deeper_warmup(p: int, m: int, warmup: int) -> None:
    proof = check(build("eager-1f1b", p, m, warmup=warmup))
    assert proof.in_flight == tuple(min(m, warmup * (p - 1 - s) + 1) for s in range(p))


@given(depths=st.lists(st.integers(1, 9), min_size=1, max_size=6), m=microbatches)
def test_a_warmup_for_every_stage(depths: list[int], m: int) -> None:
    """Those that work are accepted and those that would deadlock are not."""
    falling = sorted(depths, reverse=True)
    schedule = build("eager-1f1b", len(depths), m, warmup=falling)
    assert check(schedule).in_flight == tuple(min(m, depth) for depth in falling)
    if depths != falling:
        with pytest.raises(ScheduleError, match="would deadlock"):
            build("eager-1f1b", len(depths), m, warmup=depths)


@pytest.mark.parametrize(
    ("warmup", "message"),
    [(-1, "warmup=-1"), ([3, 2], "2 entries for 3 stages"), ([2, 1, 0], "would deadlock")],
)
def test_a_warmup_that_does_not_fit(warmup: int | list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build("eager-1f1b", 3, 4, warmup=warmup)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"'2f2b'.*naive, gpipe, 1f1b, eager-1f1b"):
        build("2f2b", 2, 2)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_a_size_below_one_is_an_error(name: str, p: int, m: int) -> None:
    with pytest.raises(ScheduleError, match=f"num_stages={p} and num_microbatches={m}"):
        build(name, p, m)


def test_the_known_schedules_cannot_be_overwritten() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["naive"] = SCHEDULES["gpipe"]  # type: ignore[index]


def test_an_action_reads_as_kind_stage_microbatch() -> None:
    assert str(Action(Kind.BACKWARD, 1, 12)) == "B1.12"


def test_halves_that_cost_more_than_the_whole() -> None:
    costs = Costs((1.0, 1.0), (2.0, 3.0), (1.0, 1.0), halving=(0.5, 0.0))
    assert costs.inputs == (1.5, 2.0)
    assert costs.seconds(Action(Kind.BACKWARD, 0, 0)) == 2.0  # a whole one does not
    with pytest.raises(InputError, match="2 stages, but halving has 1 entries"):
        Costs((1.0, 1.0), (2.0, 3.0), (1.0, 1.0), halving=(0.5,))
