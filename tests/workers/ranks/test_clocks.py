"""How far apart clocks are, by messages that take different times."""

from __future__ import annotations

from random import Random

import pytest

from penstock.workers.ranks import clocks
from penstock.workers.ranks.clocks import Clock, ClockOffset


@pytest.mark.parametrize("ahead", [0, 5_000_000_000, -7_123_456_789])
def test_the_offset_is_found_within_the_fastest_messages(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """By at most half of what the fastest ones there and back differ by."""
    random, there, clock = Random(1), ClockOffset(), Clock()
    for second in range(40):
        sent = second * 10**9
        takes = random.randint(100_000, 2_000_000)
        there.note(sent, sent + ahead + takes)
        back = random.randint(100_000, 2_000_000)
        monkeypatch.setattr(clocks, "monotonic_ns", lambda: sent + 5_000_000 + back)  # noqa: B023
        clock.note("another", there.least, sent + ahead + 5_000_000)
    assert abs(clock.ahead - ahead) < 200_000


def test_on_the_same_machine_there_is_one_clock() -> None:
    clock = Clock()
    clock.note(clocks.machine(), 123_456_789, 0)
    assert clock.ahead == 0


def test_only_the_latest_messages_count() -> None:
    """Clocks drift, so what was the least an hour ago means nothing."""
    apart = ClockOffset()
    apart.note(0, 1)
    for _ in range(64):
        apart.note(0, 50)
    assert apart.least == 50
    assert ClockOffset().least is None
