"""The step that is under way, as it fills."""

from __future__ import annotations

import pytest

from penstock.observe.staircase import Staircase

BEGUN = 1_000_000_000
WIDTH = len("worker 0 |") + 10 + len("|") + 12
"""With ten columns for the predicted time."""


def at(seconds: float) -> int:
    return BEGUN + round(1e9 * seconds)


@pytest.fixture
def stairs() -> Staircase:
    """Of a step of one second; the second worker had begun to wait before the first look."""
    stairs = Staircase(1.0)
    stairs.look(at(0.2), BEGUN, {0: ("0", at(0.0)), 1: (".", at(0.1))})
    stairs.look(at(0.4), BEGUN, {0: ("1", at(0.3)), 1: (".", at(0.1))})
    stairs.look(at(0.6), BEGUN, {0: ("1", at(0.3)), 1: ("0", at(0.5))})
    return stairs


def test_marks_fill_from_when_something_began(stairs: Staircase) -> None:
    assert stairs.lines(WIDTH) == ["worker 0 |000111    |", "worker 1 | ....0    |"]
    assert stairs.is_under_way
    assert stairs.seconds == pytest.approx(0.6)


def test_what_is_beyond_the_prediction_is_compressed(stairs: Staircase) -> None:
    stairs.look(at(2.0), BEGUN, {0: ("a", at(1.0)), 1: ("0", at(0.5))})
    first, second = stairs.lines(WIDTH)
    assert first == "worker 0 |0001111111|aaaaaa"
    assert second == "worker 1 | ....00000|000000"
    stairs.look(at(1e6), BEGUN, {0: ("a", at(1.0)), 1: ("0", at(0.5))})
    assert {len(line) for line in stairs.lines(WIDTH)} == {WIDTH - 1}


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("predicted", [0.0, 1e-6, 0.1, 60.0])
def test_no_line_is_wider_than_the_screen(width: int, predicted: float) -> None:
    stairs = Staircase(predicted)
    for look in range(1, 200):
        now = at(look * look / 100)
        stairs.look(now, BEGUN, {w: (str((look + w) % 10), now - 10) for w in (0, 9, 10)})
        assert max(map(len, stairs.lines(width)), default=0) <= width
    assert len(stairs.lines(width)) == 3
    assert stairs.lines(width)[2].startswith("worker 10 |")


def test_there_is_nothing_where_there_is_no_room(stairs: Staircase) -> None:
    assert stairs.lines(20) == []
    assert Staircase(1.0).lines(80) == []


def test_the_latest_pass_remains_until_the_next_begins(stairs: Staircase) -> None:
    before = stairs.lines(WIDTH)
    stairs.look(at(0.9), 0, {0: (" ", at(0.9)), 1: (" ", at(0.8))})
    assert not stairs.is_under_way
    assert stairs.lines(WIDTH) == before
    again = at(5.0)
    stairs.look(at(5.1), again, {0: ("0", again), 1: (" ", again)})
    assert stairs.lines(WIDTH) == ["worker 0 |0         |", "worker 1 |          |"]


def test_waiting_for_long_takes_no_more_memory(stairs: Staircase) -> None:
    def size() -> int:
        return sum(map(len, stairs._seen.values()))

    before = size()
    for look in range(100):
        stairs.look(at(1 + look), BEGUN, {0: ("1", at(0.3)), 1: ("0", at(0.5))})
    assert size() == before


def test_short_steps_are_not_drawn(stairs: Staircase) -> None:
    assert stairs.is_worth_it(None)
    short = Staircase(0.001)
    assert not short.is_worth_it(None)
    assert not short.is_worth_it(0.002)
    assert short.is_worth_it(0.8)
    short.look(at(3.0), BEGUN, {0: (".", at(0.0))})
    assert short.is_worth_it(0.002)
