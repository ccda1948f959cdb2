"""The partition against brute force over every way to cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.errors import InputError, PlanError
from penstock.plan.bound import step_bound
from penstock.plan.partition import Partition, partition
from tests.plan.brute_force import Option, Problem, problems


# Small whole numbers give many ties and no rounding; any floats give neither.
@settings(max_examples=250)
@given(problems())
def test_optimal_and_lightest_among_the_optimal(problem: Problem) -> None:
    problem.check()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(
            options=[
                Option(
                    [
                        [8, 0, 2, 2, 1, 0, 0, 1],
                        [2, 2, 2, 2, 2, 1, 2, 0],
                        [2, 2, 2, 0, 2, 1, 2, 1],
                        [1, 0, 0, 2, 1, 0, 0, 2],
                    ]
                )
            ],
            latency=[[0, 4, 0, 1, 0, 0, 1, 1, 0]] * 3,
            allowed=[True] * 9,
            tie=[0, 1, 18, 16, 17, 17, 16, 15, 0],
            m=4,
            fill=1.0,
        ),
        Problem(
            options=[
                Option(
                    [
                        [7, 0, 1, 0, 1, 1, 2],
                        [1, 2, 0, 0, 2, 1, 0],
                        [1, 2, 0, 0, 1, 1, 2],
                        [1, 0, 0, 0, 0, 0, 0],
                    ]
                )
            ],
            latency=[[0, 5, 5, 0, 4, 4, 4, 0]] * 3,
            allowed=[True] * 8,
            tie=[0, 13, 19, 5, 15, 17, 6, 0],
            m=3,
            fill=1.0,
        ),
    ],
)
def test_the_lightest_cuts_are_not_the_fastest_ones(problem: Problem) -> None:
    """A heavy first call leaves slack, and an early light cut spends what a later one needs."""
    problem.check()


@settings(max_examples=200)
@given(problems(whole=False))
def test_optimal_for_any_numbers(problem: Problem) -> None:
    found = problem.solve()
    best = problem.best()
    assert found.objective == pytest.approx(best, rel=2e-9)
    assert problem.objective(found.cuts) == pytest.approx(best, rel=2e-9)


def test_seven_equal_layers_on_four_devices() -> None:
    """torchgpipe's balancer gives [1, 1, 1, 4] here, twice the bottleneck of the best."""
    found = partition(np.ones((4, 7)), num_microbatches=1, fill=0.0)
    sizes = np.diff([0, *found.cuts, 7])
    assert found.objective == 2.0
    assert sizes.max() == 2
    assert sizes.min() >= 1


def test_the_objective_is_the_bound() -> None:
    rng = np.random.default_rng(0)
    seconds, latency = rng.random((3, 40)), rng.random(41)
    found = partition(seconds, num_microbatches=8, latency=latency)
    a, b = found.cuts
    stages = [seconds[0, :a].sum(), seconds[1, a:b].sum(), seconds[2, b:].sum()]
    assert found.objective == pytest.approx(step_bound(stages, [latency[a], latency[b]], 8))


def test_a_slow_device_gets_less() -> None:
    seconds = np.ones((2, 12)) * [[3.0], [1.0]]
    assert partition(seconds, num_microbatches=4, fill=0.0).cuts == (3,)


def test_filling_counts_against_late_stages() -> None:
    """With few micro-batches the later stages wait, so the best first stage is the larger one."""
    seconds = np.ones((2, 12))
    assert partition(seconds, num_microbatches=2, fill=0.0).cuts == (6,)
    assert partition(seconds, num_microbatches=2, fill=1.0).cuts == (8,)


def test_equal_cuts_go_to_the_smaller_boundary() -> None:
    tie = np.array([0.0, 9.0, 9.0, 1.0, 9.0, 9.0, 0.0])
    seconds = np.array([[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]] * 2)
    assert partition(seconds, num_microbatches=1, fill=0.0, tie=tie).cuts == (3,)


def test_a_latency_decides_between_equal_cuts() -> None:
    latency = np.array([0.0, 1.0, 1.0, 0.1, 1.0, 1.0, 0.0])
    seconds = np.array([[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]] * 2)
    found = partition(seconds, num_microbatches=1, latency=latency)
    assert found == Partition(cuts=(3,), objective=2.2, variants=(0, 0), devices=(0, 1))


def test_links_of_different_speed() -> None:
    """The slow link is crossed where little does."""
    boundary = np.array([0.0, 1.0, 9.0, 9.0, 2.0, 9.0, 0.0])
    links = boundary * [[1.0], [100.0]]
    found = partition(np.ones((3, 6)), num_microbatches=1, latency=links)
    assert found.cuts[1] == 4
    assert partition(np.ones((3, 6)), num_microbatches=1, latency=links[::-1]).cuts[0] == 1


def test_the_ends_of_boundary_arrays_are_not_used() -> None:
    ends = np.array([np.nan, 1.0, 1.0, 1.0, np.inf])
    found = partition(np.ones((2, 4)), num_microbatches=1, fill=0.0, latency=ends, tie=ends)
    assert found.objective == 2.0


def test_a_call_that_a_device_can_hardly_run_goes_elsewhere() -> None:
    rng = np.random.default_rng(3)
    seconds = rng.random((3, 8)) * 1e-3
    seconds[0, 4:] = seconds[1, :2] = seconds[2, :5] = 1e12
    zeros = [0.0] * 9
    options = [Option(seconds.tolist())]
    problem = Problem(options, [zeros] * 2, [True] * 9, zeros, m=4, fill=1.0)
    best = problem.best()
    assert best < 1.0
    assert problem.solve().objective == pytest.approx(best, rel=1e-12)


def test_one_device_takes_everything() -> None:
    assert partition(np.array([[1.0, 2.0, 3.0]]), num_microbatches=2) == Partition(
        (), 12.0, (0,), (0,)
    )


def test_calls_that_cost_nothing() -> None:
    found = partition(np.zeros((3, 5)), num_microbatches=4)
    assert found.objective == 0.0
    assert len(set(found.cuts)) == 2


def test_a_real_size() -> None:
    """A thousand calls on 64 unequal devices, against what calls of no size would reach."""
    rng = np.random.default_rng(1)
    seconds = rng.lognormal(0.0, 0.3, 1000) * rng.uniform(0.9, 1.1, (64, 1))
    found = partition(seconds, num_microbatches=1, fill=0.0, tie=rng.random(1001))
    floor = 1.0 / (1.0 / seconds.sum(axis=1)).sum()
    assert floor <= found.objective <= 1.05 * floor
    assert len(found.cuts) == 63


def test_more_stages_than_calls() -> None:
    with pytest.raises(PlanError, match="4 stages need at least 4 calls, but the program has 3"):
        partition(np.ones((4, 3)), num_microbatches=1)


def test_fewer_cuts_than_needed() -> None:
    allowed = [True, False, True, False, False, True]  # the ends do not count
    with pytest.raises(PlanError, match=r"need 2 cuts, but only 1 of the 4 .* at most 2 devices"):
        partition(np.ones((3, 5)), num_microbatches=1, allowed=allowed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.ones(5)}, r"got the shape \(5,\)"),
        ({"seconds": np.ones((2, 0))}, r"got the shape \(2, 0\)"),
        ({"seconds": -np.ones((2, 5))}, "seconds must be finite and not negative, got -1.0"),
        ({"seconds": np.full((2, 5), np.nan)}, "seconds must be finite and not negative, got nan"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"fill": -0.5}, "fill must be finite and not negative, got -0.5"),
        ({"latency": np.zeros(5)}, r"latency has the shape \(5,\), expected \(6,\)"),
        ({"latency": -np.ones(6)}, "latency must be finite and not negative"),
        ({"tie": np.zeros(7)}, r"tie has the shape \(7,\), expected \(6,\)"),
        ({"allowed": [True] * 4}, r"allowed has the shape \(4,\), expected \(6,\)"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"seconds": np.ones((2, 5)), "num_microbatches": 4} | changes
    with pytest.raises(InputError, match=message):
        partition(arguments.pop("seconds"), **arguments)
