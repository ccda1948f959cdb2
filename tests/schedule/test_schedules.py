"""The schedules: sound for every size, and as frugal as they promise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Action, Kind, build, check

PROMISED_IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "naive": lambda p, m, s: 1,
    "gpipe": lambda p, m, s: m,
    "1f1b": lambda p, m, s: min(m, p - s),
    "eager-1f1b": lambda p, m, s: min(m, 2 * (p - s) - 1),
}

stages = st.integers(1, 6)
microbatches = st.integers(1, 10)


def test_every_schedule_has_a_promise() -> None:
    assert set(PROMISED_IN_FLIGHT) == set(SCHEDULES)


@given(name=st.sampled_from(sorted(SCHEDULES)), p=stages, m=microbatches)
def test_is_sound_and_holds_what_it_promises(name: str, p: int, m: int) -> None:
    schedule = build(name, p, m)
    proof = check(schedule)
    assert proof.in_flight == tuple(PROMISED_IN_FLIGHT[name](p, m, s) for s in range(p))
    assert proof.placement == tuple(range(p))
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, p, m)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_stage_needs_no_pipeline(name: str) -> None:
    actions = build(name, 1, 3).workers[0]
    backwards = [action.microbatch for action in actions if action.kind is Kind.BACKWARD]
    assert backwards == [0, 1, 2]
    assert len(actions) == 6


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


def test_the_planning_layers_do_not_import_torch() -> None:
    modules = "penstock.schedule, penstock.simulate, penstock.plan.bound, penstock.plan.partition"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
