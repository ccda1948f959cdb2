"""Devices of few kinds in any order, against brute force over their permutations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError, PlanError
from penstock.plan.partition import CapacityError, Partition, Variant, partition
from tests.plan.brute_force import Numbers, Option, Problem


@dataclass(frozen=True)
class Kinds:
    """A problem whose row `kind * p + stage` is about a device of that kind at that stage."""

    counts: list[int]
    problem: Problem

    @property
    def stages(self) -> int:
        return sum(self.counts)

    def solve(self) -> Partition:
        problem, shape = self.problem, (len(self.counts), self.stages)
        return partition(
            [
                Variant(
                    np.array(option.seconds)[:: self.stages],
                    np.array(option.memory).reshape(*shape, -1),
                    np.array(option.entry).reshape(*shape, -1),
                )
                for option in problem.options
            ],
            counts=self.counts,
            num_microbatches=problem.m,
            fill=problem.fill,
            latency=np.array(problem.latency).reshape(self.stages - 1, problem.calls + 1),
            allowed=problem.allowed,
            tie=np.array(problem.tie),
            caps=(problem.caps or [])[:: self.stages],
        )

    def orders(self) -> set[tuple[int, ...]]:
        kinds = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        return set(itertools.permutations(kinds))

    def in_order(self, kinds: tuple[int, ...]) -> Problem:
        """The problem of devices of these kinds, in this order."""
        rows = [kind * self.stages + stage for stage, kind in enumerate(kinds)]

        def chosen(table: list[Any]) -> list[Any]:
            return [table[row] for row in rows]

        problem = self.problem
        options = [
            Option(chosen(o.seconds), chosen(o.memory), chosen(o.entry)) for o in problem.options
        ]
        caps = chosen(problem.caps or [])
        return replace(problem, options=options, caps=caps)


def random_kinds(seed: int) -> Kinds:
    numbers = Numbers(seed)
    rng = numbers.rng
    counts: list[int] = rng.integers(0, 3, rng.integers(1, 4)).tolist()
    counts[0] += not sum(counts)
    p, rows = sum(counts), sum(counts) * len(counts)
    n = int(rng.integers(p, 8))
    one_for_all = [[0.0] * (n + 1), numbers.whole(n + 1)][rng.integers(2)]

    def option() -> Option:
        seconds = [row for row in numbers.whole(len(counts), n) for _ in range(p)]
        return Option(seconds, numbers.whole(rows, n), numbers.whole(rows, n + 1))

    problem = Problem(
        options=[option() for _ in range(rng.integers(1, 3) if p < 4 else 1)],
        latency=numbers.whole(p - 1, n + 1) if rng.random() < 0.3 else [one_for_all] * (p - 1),
        allowed=numbers.allowed(p, n),
        tie=numbers.whole(n + 1),
        m=int(rng.integers(1, 6)),
        fill=float(rng.choice([0.0, 0.5, 1.0])),
        caps=[cap for cap in numbers.whole(len(counts), most=round(24 * n / p)) for _ in range(p)],
    )
    return Kinds(counts, problem)


def check(kinds: Kinds) -> None:
    orders = {order: kinds.in_order(order) for order in kinds.orders()}
    best = {order: problem.best() for order, problem in orders.items()}
    least = min(best.values())
    try:
        found = kinds.solve()
    except CapacityError as error:
        assert least == math.inf
        short = error.shortfall
    else:
        short = None
    if short is not None:
        assert short.bytes == min(problem.shortfall() for problem in orders.values()) > 0
        assert short.bytes == orders[short.partition.devices].shortfall()
        assert short.device == short.partition.devices[short.stage]
        return
    assert found.objective == least
    assert best[found.devices] == least
    assert orders[found.devices].objective(found.cuts, found.variants) == least
    assert (found.cuts, found.variants) in orders[found.devices].every_choice()
    lightest = min(orders[o].least_ties() for o in orders if best[o] == least)
    assert orders[found.devices].ties(found.cuts) == lightest


SEEDS = st.integers(0, 2**40)


@settings(max_examples=150)
@given(SEEDS.map(random_kinds))
def test_the_best_of_all_orders(kinds: Kinds) -> None:
    check(kinds)


@pytest.mark.slow
@settings(max_examples=2000)
@given(SEEDS.map(random_kinds))
def test_the_best_of_all_orders_two_thousand_times(kinds: Kinds) -> None:
    check(kinds)


def test_the_large_device_goes_where_the_heavy_calls_are() -> None:
    memory = np.array([[1.0, 1.0, 1.0, 9.0, 9.0]] * 2)
    found = partition(
        [Variant(np.ones((2, 5)), memory)], counts=[1, 1], num_microbatches=4, caps=[20.0, 5.0]
    )
    assert found.devices == (1, 0)
    assert found.cuts == (3,)


def test_in_flight_decides_where_the_small_device_goes() -> None:
    """The first stage holds two micro-batches, the last stage one."""
    memory = np.ones((2, 2, 4)) * [[[2.0], [1.0]]]
    costs = [Variant(np.ones((2, 4)), memory)]
    found = partition(costs, counts=[1, 1], num_microbatches=1, fill=0.0, caps=[2.0, 4.0])
    assert found == Partition(cuts=(2,), objective=2.0, variants=(0, 0), devices=(1, 0))


def test_one_kind_is_a_given_order() -> None:
    rng = np.random.default_rng(2)
    row, latency, tie = rng.random((1, 60)), rng.random(61) * 0.1, rng.random(61)
    found = partition(row, counts=[5], num_microbatches=8, latency=latency, tie=tie)
    chain = partition(row.repeat(5, 0), num_microbatches=8, latency=latency, tie=tie)
    assert found.cuts == chain.cuts
    assert found.objective == chain.objective
    assert found.devices == (0,) * 5


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2], "costs of 2 kinds of devices, but counts has 1 entries"),
        ([2, -1], r"counts=\[2, -1\]: give at least one device, and none below zero"),
        ([0, 0], r"counts=\[0, 0\]: give at least one device"),
    ],
)
def test_counts_that_do_not_fit(counts: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(np.ones((2, 9)), counts=counts, num_microbatches=1)


def test_too_many_ways_to_have_used_the_devices() -> None:
    with pytest.raises(PlanError, match=r"counts=\[64, 64\] can be used up in 4225 ways, and at"):
        partition(np.ones((2, 200)), counts=[64, 64], num_microbatches=1)


def test_memory_by_stage_needs_every_stage() -> None:
    costs = [Variant(np.ones((2, 9)), np.ones((2, 4, 9)))]
    with pytest.raises(InputError, match=r"shape \(2, 4, 9\), expected one row per kind, or one"):
        partition(costs, counts=[2, 1], num_microbatches=1)
