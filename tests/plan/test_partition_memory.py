"""Memory caps and variants: the partition against brute force, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.errors import InputError
from penstock.plan.partition import CapacityError, Partition, Shortfall, Variant, partition
from tests.plan.brute_force import Problem, problems


@settings(max_examples=250)
@given(problems(memory=True))
def test_optimal_within_the_memory(problem: Problem) -> None:
    problem.check()


@pytest.mark.slow
@settings(max_examples=2000)
@given(problems(memory=True))
def test_optimal_within_the_memory_two_thousand_times(problem: Problem) -> None:
    problem.check()


@settings(max_examples=150)
@given(problems(whole=False, memory=True))
def test_optimal_within_the_memory_for_any_seconds(problem: Problem) -> None:
    try:
        found = problem.solve()
    except CapacityError as error:
        problem.check_shortfall(error)
        return
    best = problem.best()
    assert found.objective == pytest.approx(best, rel=2e-9)
    assert problem.objective(found.cuts, found.variants) == pytest.approx(best, rel=2e-9)


def heavy(**changes: Any) -> Variant:
    """Eight calls of a second and ten bytes on two devices, and two bytes to enter a stage."""
    arrays = {"seconds": np.ones((2, 8)), "memory": np.full((2, 8), 10.0)} | changes
    return Variant(**arrays, entry=np.full((2, 9), 2.0))


def test_a_small_device_gets_less() -> None:
    found = partition(
        [heavy()], num_microbatches=1, fill=0.0, caps=[24.0, np.inf], latency=np.zeros(9)
    )
    assert found == Partition(cuts=(2,), objective=6.0, variants=(0, 0), devices=(0, 1))


def test_only_the_stage_that_has_to_recompute_does() -> None:
    recomputed = heavy(seconds=np.full((2, 8), 1.25), memory=np.ones((2, 8)))
    found = partition([heavy(), recomputed], num_microbatches=1, fill=0.0, caps=[24.0, np.inf])
    assert found == Partition(cuts=(4,), objective=5.0, variants=(1, 0), devices=(0, 1))


def test_of_equally_fast_variants_the_first() -> None:
    found = partition([heavy(), heavy()], num_microbatches=1, caps=[1e3, 1e3])
    assert found.variants == (0, 0)


def shortfall(costs: list[Variant], caps: list[float]) -> Shortfall:
    with pytest.raises(CapacityError) as caught:
        partition(costs, num_microbatches=1, caps=caps)
    return caught.value.shortfall


def test_a_byte_decides() -> None:
    costs = [heavy()]
    assert partition(costs, num_microbatches=1, caps=[42.0, 42.0]).cuts == (4,)
    assert shortfall(costs, [41.0, 42.0]).bytes == 1.0


def test_large_bytes_are_exact() -> None:
    """A petabyte in calls, and one byte too few."""
    costs = [Variant(np.ones((2, 8)), np.full((2, 8), 1e15 + 1))]
    caps = [4e15 + 4, 4e15 + 3]
    found = shortfall(costs, caps)
    assert (found.bytes, found.stage, found.calls) == (1.0, 1, (4, 8))


def test_parts_of_bytes_are_rounded_to_the_safe_side() -> None:
    costs = [Variant(np.ones((1, 2)), np.array([[0.25, 1.0]]))]
    assert partition(costs, num_microbatches=1, caps=[2.0]).cuts == ()
    assert shortfall(costs, [1.75]).bytes == 1.0


def test_the_error_says_how_much_and_where() -> None:
    message = (
        r"would need 38.0 kB more \(38000 bytes\).*stage 0 \(calls 0 to 3\) takes 40.0 kB, and its "
        r"device has 2.0 kB; use more devices"
    )
    costs = [Variant(np.ones((2, 8)), np.full((2, 8), 1e4))]
    with pytest.raises(CapacityError, match=message):
        partition(costs, num_microbatches=1, caps=[2e3, 2e3])


@pytest.mark.parametrize(
    ("variant", "caps", "message"),
    [
        ({"memory": np.ones((2, 4))}, None, r"memory has the shape \(2, 4\), expected \(2, 5\)"),
        ({"entry": np.ones((2, 5))}, None, r"entry has the shape \(2, 5\), expected \(2, 6\)"),
        ({"memory": -np.ones((2, 5))}, None, "memory must be finite and not negative, got -1.0"),
        ({}, [1.0], r"caps has the shape \(1,\), expected \(2,\)"),
        ({}, [1.0, -1.0], "caps must not be negative, got -1.0"),
        ({}, [1.0, np.nan], "caps must not be negative, got nan"),
    ],
)
def test_arguments_that_do_not_fit(
    variant: dict[str, Any], caps: list[float] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        partition([Variant(np.ones((2, 5)), **variant)], num_microbatches=1, caps=caps)


def test_variants_of_different_shapes() -> None:
    variants = [Variant(np.ones((2, 5))), Variant(np.ones((2, 4)))]
    with pytest.raises(InputError, match=r"seconds has the shape \(2, 4\), expected \(2, 5\)"):
        partition(variants, num_microbatches=1)
