"""The lower bound of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plan.bound import step_bound


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
