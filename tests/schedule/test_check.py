"""Broken schedules: each way to be wrong has a message that says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Action, Check, Kind, Schedule, build, check

F, B = Kind.FORWARD, Kind.BACKWARD


def edited(worker: int, edit: Callable[[list[Action]], None], name: str = "1f1b") -> Schedule:
    """The schedule of three stages and four micro-batches after `edit` of one worker's list."""
    schedule = build(name, 3, 4)
    lists = [list(actions) for actions in schedule.workers]
    edit(lists[worker])
    return replace(schedule, workers=tuple(map(tuple, lists)))


def by_hand(*workers: str, stages: int, microbatches: int) -> Schedule:
    """A schedule from texts like `"F0.0 B0.0"`, one per worker."""

    def parse(word: str) -> Action:
        stage, microbatch = word[1:].split(".")
        return Action(Kind(word[0]), int(stage), int(microbatch))

    lists = tuple(tuple(map(parse, worker.split())) for worker in workers)
    return Schedule("by hand", stages, microbatches, lists)


def swap(actions: list[Action], first: Action, second: Action) -> None:
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = actions[j], actions[i]


def test_a_missing_action() -> None:
    broken = edited(1, lambda actions: actions.remove(Action(B, 1, 2)))
    with pytest.raises(ScheduleError, match=r"worker 1 never runs B1\.2"):
        check(broken)


def test_an_action_twice() -> None:
    broken = edited(2, lambda actions: actions.append(Action(F, 2, 1)))
    with pytest.raises(ScheduleError, match=r"worker 2 runs F2\.1 2 times"):
        check(broken)


def test_a_microbatch_that_does_not_exist() -> None:
    broken = edited(0, lambda actions: actions.append(Action(F, 0, 4)))
    with pytest.raises(ScheduleError, match=r"worker 0 runs F0\.4, but the micro-batches are 0 to"):
        check(broken)


@pytest.mark.parametrize("kind", [F, B])
def test_microbatches_out_of_order(kind: Kind) -> None:
    broken = edited(
        0, lambda actions: swap(actions, Action(kind, 0, 2), Action(kind, 0, 1)), "gpipe"
    )
    text = kind.value
    with pytest.raises(ScheduleError, match=rf"worker 0 runs {text}0\.2 before {text}0\.1"):
        check(broken)


def test_backwards_in_reverse_order_as_in_the_gpipe_paper() -> None:
    schedule = build("gpipe", 3, 4)
    reverse = tuple(actions[:4] + actions[:3:-1] for actions in schedule.workers)
    with pytest.raises(ScheduleError, match=r"worker 0 runs B0\.3 before B0\.0"):
        check(replace(schedule, workers=reverse))


def test_a_stage_on_two_workers() -> None:
    broken = by_hand("F0.0 B0.0", "F0.1 B0.1", stages=1, microbatches=2)
    with pytest.raises(ScheduleError, match=r"stage 0 is run by worker 0 and by worker 1"):
        check(broken)


def test_a_stage_without_a_worker() -> None:
    with pytest.raises(ScheduleError, match="no worker runs stage 1"):
        check(by_hand("F0.0 B0.0", stages=2, microbatches=1))


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(ScheduleError, match="worker 0 runs stage 3, but the stages are 0 to 0"):
        check(by_hand("F0.0 B0.0 F3.0", stages=1, microbatches=1))


def test_a_backward_before_its_forward() -> None:
    with pytest.raises(ScheduleError, match=r"worker 0 is stuck on B0\.0, which waits for F0\.0"):
        check(by_hand("B0.0 F0.0", stages=1, microbatches=1))


def test_a_deadlock_says_what_every_worker_is_stuck_on() -> None:
    broken = by_hand("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", stages=2, microbatches=2)
    with pytest.raises(ScheduleError) as error:
        check(broken)
    assert str(error.value) == (
        "by hand with 2 stages and 2 micro-batches deadlocks after 2 of 8 actions: "
        "worker 0 is stuck on B0.0, which waits for B1.0; "
        "worker 1 is stuck on F1.1, which waits for F0.1"
    )


def test_several_stages_on_a_worker() -> None:
    schedule = by_hand(
        "F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 B0.1",
        "F1.0 F1.1 B1.0 B1.1",
        stages=3,
        microbatches=2,
    )
    assert check(schedule) == Check(placement=(0, 1, 0), in_flight=(2, 2, 1))


def test_halves() -> None:
    schedule = by_hand("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1", stages=1, microbatches=2)
    assert check(schedule) == Check(placement=(0,), in_flight=(2,), splits_backward=True)


def test_halves_hold_a_micro_batch_until_its_weight_half() -> None:
    one = by_hand("F0.0 I0.0 W0.0 F0.1 B0.1", stages=1, microbatches=2)
    late = by_hand("F0.0 I0.0 F0.1 W0.0 B0.1", stages=1, microbatches=2)
    assert (check(one).in_flight, check(late).in_flight) == ((1,), (2,))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("F0.0 I0.0", r"never runs W0\.0"),
        ("F0.0 W0.0", r"never runs I0\.0"),
        ("F0.0", r"never runs B0\.0"),
        ("F0.0 B0.0 W0.0", r"runs B0\.0 and W0\.0; a backward is whole, or it is two halves"),
        ("F0.0 I0.0 B0.0 W0.0", r"runs I0\.0 and B0\.0; a backward is whole"),
        ("F0.0 W0.0 I0.0", r"stuck on W0\.0, which waits for I0\.0"),
        ("F0.0 I0.0 W0.0 W0.0", r"runs W0\.0 2 times"),
    ],
)
def test_broken_halves(worker: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(by_hand(worker, stages=1, microbatches=1))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("F0.0 F0.1 I0.0 B0.1 W0.0", r"runs B0\.1 before W0\.0"),
        ("F0.0 F0.1 I0.0 I0.1 W0.1 W0.0", r"runs W0\.1 before W0\.0"),
        ("F0.0 F0.1 I0.1 I0.0 W0.0 W0.1", r"runs I0\.1 before I0\.0"),
    ],
)
def test_gradients_out_of_order(worker: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(by_hand(worker, stages=1, microbatches=2))


def test_a_deadlock_names_the_half_that_is_awaited() -> None:
    broken = by_hand("F0.0 B0.0", "I1.0 F1.0 W1.0", stages=2, microbatches=1)
    with pytest.raises(ScheduleError, match=r"worker 0 is stuck on B0\.0, which waits for I1\.0"):
        check(broken)


def test_an_idle_worker_is_no_error() -> None:
    schedule = by_hand("F0.0 B0.0", "", stages=1, microbatches=1)
    assert check(schedule).in_flight == (1,)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.sampled_from([2, 4]),
    v=st.integers(1, 2),
    m=st.integers(1, 5),
    data=st.data(),
)
def test_accepts_a_shuffled_list_only_if_any_clock_can_run_it(
    name: str, p: int, v: int, m: int, data: st.DataObject
) -> None:
    """Two neighbours swapped: `check` agrees with a step-by-step execution of the rules."""
    assume(SCHEDULES[name].takes(p, p // v))
    lists = [list(actions) for actions in build(name, p, m, num_workers=p // v).workers]
    actions = lists[data.draw(st.integers(0, len(lists) - 1))]
    place = data.draw(st.integers(0, len(actions) - 2))
    actions[place], actions[place + 1] = actions[place + 1], actions[place]
    schedule = Schedule(name, p, m, tuple(map(tuple, lists)))
    try:
        check(schedule)
    except ScheduleError:
        accepted = False
    else:
        accepted = True
    one, other = actions[place : place + 2]
    kept_order = one.kind is not other.kind or one.stage != other.stage
    assert accepted == (kept_order and runs_to_the_end(schedule))


def runs_to_the_end(schedule: Schedule) -> bool:
    """The rules of the pipeline, spelled out: keep running any head whose needs are done."""
    p = schedule.num_stages
    done: set[Action] = set()
    lists = [list(actions) for actions in schedule.workers]

    def can_run(action: Action) -> bool:
        kind, s, i = action
        if kind is F:
            return s == 0 or Action(F, s - 1, i) in done
        if kind is Kind.WEIGHT:
            return Action(Kind.INPUT, s, i) in done
        after = {Action(B, s + 1, i), Action(Kind.INPUT, s + 1, i)}
        return Action(F, s, i) in done and (s == p - 1 or bool(after & done))

    moved = True
    while moved:
        moved = False
        for actions in lists:
            while actions and can_run(actions[0]):
                done.add(actions.pop(0))
                moved = True
    return not any(lists)
