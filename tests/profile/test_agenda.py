"""Which micro-batch sizes are measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.profile.agenda import Agenda


def measured(
    batch: int,
    cost: Callable[[int], float] = lambda rows: float(rows),
    *,
    devices: int = 2,
    seconds: float = 1e9,
    count: int | None = None,
    refused: tuple[int, ...] = (),
) -> list[int]:
    """In this order for the first time, when measuring a size takes five times its cost."""
    return list(dict.fromkeys(asked(batch, cost, devices, seconds, count, refused)))


def asked(
    batch: int,
    cost: Callable[[int], float] = lambda rows: float(rows),
    devices: int = 2,
    seconds: float = 1e9,
    count: int | None = None,
    refused: tuple[int, ...] = (),
) -> list[int]:
    sizes = Agenda(batch, devices, seconds, count)
    order = []
    while (rows := sizes.next()) is not None:
        if rows in refused:
            sizes.refuse(rows)
            continue
        order.append(rows)
        sizes.learn(rows, cost(rows), 5 * cost(rows))
    return order


def test_powers_of_two_first_and_then_even_splits_between_them() -> None:
    order = measured(24, lambda rows: 1 + rows)
    assert order[:6] == [1, 12, 6, 3, 2, 24]
    assert set(order[6:]) <= {4, 8}


def test_sizes_that_cannot_be_the_best_are_not_measured_in_between() -> None:
    assert measured(24, lambda rows: 100.0 + rows)[6:] == []  # the fewest launches: one of 24


def test_a_size_between_may_be_cheap() -> None:
    """Of 60 rows with a launch of 8 rows' time, about sqrt(8 * 60) rows are best."""
    assert measured(60, lambda rows: rows + 8.0) == [1, 30, 15, 8, 4, 2, 60, 20, 12]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, [1, 2]), (40.0, [1, 4, 2]), (100.0, [1, 16, 2]), (1e3, [1, 16, 8, 4, 2, 32])],
)
def test_time_is_limited_but_two_sizes_are_measured(seconds: float, expected: list[int]) -> None:
    assert measured(32, seconds=seconds) == expected


@pytest.mark.parametrize(("devices", "expected"), [(1, 64), (2, 32), (4, 16), (3, 16)])
def test_the_most_promising_is_measured_where_there_is_little_time(
    devices: int, expected: int
) -> None:
    """One micro-batch for every device, if that is a size; a row takes less time in it."""
    order = measured(64, lambda rows: 8.0 + rows, devices=devices, seconds=5 * 9.0 * 65)
    assert order[:2] == [1, expected]


def test_what_takes_less_than_one_row_promised_comes_into_reach() -> None:
    """By one row all 32 would take 960 of 600; after 16 it is known to be 240."""
    order = measured(32, lambda rows: 4.0 + rows, devices=1, seconds=600.0)
    assert order[:3] == [1, 16, 32]


def test_what_promises_to_be_faster_may_take_twice_as_much_time_again() -> None:
    """By one row all 32 would take 360 of 100, so 4 come first; by these, 120 of what is left."""
    asked = measured(32, lambda rows: 2.0 + rows / 4, devices=1, seconds=100.0)
    assert asked[:3] == [1, 4, 32]
    assert measured(32, lambda rows: 2.0 + rows / 4, devices=1, seconds=20.0) == [1, 2]
    alike = measured(32, lambda rows: rows / 4, devices=1, seconds=18.0)  # no row takes less
    assert alike == [1, 8, 4]


def test_what_larger_sizes_take_is_expected_by_the_last_two() -> None:
    """4 rows take 1.9 times as long as one: 32 take 11.2 by that, not 15."""
    sizes = Agenda(32, 1, 14.0, None, long=0.5)
    order = []
    while (rows := sizes.next()) is not None:
        order.append(rows)
        sizes.learn(rows, 0.7 + 0.3 * rows, (2.2 if sizes.is_brief(rows) else 5.0) * 0.5)
    assert order[:3] == [1, 4, 32]


def test_what_takes_long_is_measured_briefly_so_that_more_sizes_are() -> None:
    """Every call is timed at 1 row, in five times its cost: 5 of 50 seconds."""
    sizes = Agenda(32, 2, 50.0, None, long=3.0)
    asked: dict[int, bool] = {}
    while (rows := sizes.next()) is not None:
        asked[rows] = brief = sizes.is_brief(rows)
        sizes.learn(rows, float(rows), (2.2 if brief else 5.0) * rows)
    assert asked == {1: False, 16: True, 4: True}  # 16 take 35 of 45, and 8 would take 18 of 10
    first = Agenda(32, 2, 50.0, None, long=0.0)
    assert first.next() == 1
    assert not first.is_brief(1)  # one size has to be measured as a whole
    first.learn(1, 1.0, 5.0)
    assert first.is_brief(2)


@pytest.mark.parametrize(
    ("batch", "count", "expected"), [(10, 4, [2, 3]), (12, 4, [3]), (3, 3, [1]), (120, 1, [120])]
)
def test_a_given_number_of_microbatches_is_measured_as_it_is_split(
    batch: int, count: int, expected: list[int]
) -> None:
    assert measured(batch, count=count, seconds=0.0) == expected


def test_refused_sizes_do_not_count() -> None:
    assert measured(8, refused=(1,), seconds=0.0) == [2, 4]
    assert measured(8, refused=(1, 2, 4, 8)) == []


def test_the_best_are_measured_again_while_there_is_time() -> None:
    first = measured(32, lambda rows: rows + 2.0)
    order = asked(32, lambda rows: rows + 2.0)
    assert order[: len(first)] == first
    again = order[len(first) :]
    assert again == [8, 16, 4]  # not 1, 2 and 32, which are far from the best
    assert asked(32, lambda rows: rows + 2.0, seconds=5 * 91.0) == [*first, 8, 4]


def test_a_model_that_takes_no_size_at_all() -> None:
    """Who measures then raises the error of the model's own."""
    sizes = Agenda(12, 2, 1e9, None)
    refused = []
    while (rows := sizes.next()) is not None:
        refused.append(rows)
        sizes.refuse(rows)
    assert set(refused) == {12, 6, 3, 2, 1}


def test_what_disturbed_the_first_measurement_does_not_count() -> None:
    sizes = Agenda(8, 2, 1e9, None)
    told: dict[int, list[float]] = {}
    while (rows := sizes.next()) is not None:
        cost = 1.0 + rows if rows in told or rows == 8 else 1.2 * (1.0 + rows)
        told.setdefault(rows, []).append(cost)
        sizes.learn(rows, cost, 0.1)
    assert [len(told[rows]) for rows in (2, 4)] == [2, 2]


def test_a_size_that_took_longer_than_the_others_let_expect_is_measured_again_first() -> None:
    """Also one that is far from the best: its time would be predicted all the same."""
    first = [1, 16, 8, 4, 2, 32]
    for disturbed in first:
        order = asked(32, lambda rows, d=disturbed: (rows + 2.0) * (1.3 if rows == d else 1.0))
        assert order[: len(first)] == first
        # one beside it may seem to be in doubt even more
        assert disturbed in order[len(first) : len(first) + 2]


def test_what_takes_as_long_as_the_others_let_expect_is_not_in_doubt() -> None:
    order = asked(32, lambda rows: rows + 2.0)
    assert not {1, 2, 32} & set(order[6:])
