"""Memory over time, against counting by hand and against `check`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.schedule import SCHEDULES, Kind, build, check
from penstock.simulate import memory_over_time, simulate


def test_a_small_step_by_hand() -> None:
    timeline = simulate(build("1f1b", 2, 2), lambda a: 1.0 if a.kind is Kind.FORWARD else 2.0)
    first, second = memory_over_time(timeline, held=[10.0, 7.0])
    assert first.seconds == (0.0, 1.0, 6.0, 9.0)
    assert first.bytes == (10.0, 20.0, 10.0, 0.0)
    assert (first.peak, second.peak) == (20.0, 7.0)


def test_between_the_halves_a_part_remains() -> None:
    timeline = simulate(build("zero-bubble", 1, 2), lambda action: 1.0)
    (whole,) = memory_over_time(timeline, held=[10.0])
    (part,) = memory_over_time(timeline, held=[10.0], put_off=[4.0])
    assert whole.bytes == (10.0, 10.0, 0.0, 10.0, 10.0, 0.0)
    assert part.bytes == (10.0, 4.0, 0.0, 10.0, 4.0, 0.0)
    assert part.seconds == (0.0, 2.0, 3.0, 3.0, 5.0, 6.0)


@given(name=st.sampled_from(sorted(SCHEDULES)), half=st.integers(1, 4), m=st.integers(1, 9))
def test_peaks_are_those_of_the_check_where_a_worker_has_one_stage(
    name: str, half: int, m: int
) -> None:
    schedule = build(name, 2 * half, m)
    proof = check(schedule)
    held = [float(1 + stage) for stage in range(2 * half)]
    memory = memory_over_time(simulate(schedule, lambda action: 1.0), held)
    limits = [0.0] * len(schedule.workers)
    for stage, worker in enumerate(proof.placement):
        limits[worker] += held[stage] * proof.in_flight[stage]
    if name == "zero-bubble-v":
        assert all(one.peak <= limit for one, limit in zip(memory, limits, strict=True))
    else:
        assert [one.peak for one in memory] == limits
    assert all(one.bytes[-1] == 0.0 for one in memory)


def test_a_stage_without_bytes_is_an_error() -> None:
    timeline = simulate(build("gpipe", 2, 1), lambda action: 1.0)
    with pytest.raises(InputError, match="2 stages, but held has 1 entries and put_off 0"):
        memory_over_time(timeline, held=[1.0])
