"""What to recompute within a stage, against brute force over all sets."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plan.recompute import Piece, Recomputation, choose_recomputed


@dataclass(frozen=True)
class Stage:
    segments: list[Piece]
    in_flight: int
    available: float

    def choose(self) -> Recomputation | None:
        return choose_recomputed(self.segments, in_flight=self.in_flight, available=self.available)

    def peak(self, chosen: tuple[int, ...]) -> float:
        held = [s.entry if i in chosen else s.kept for i, s in enumerate(self.segments)]
        return self.in_flight * sum(held) + max([0.0, *(self.segments[i].working for i in chosen)])

    def seconds(self, chosen: tuple[int, ...]) -> float:
        return sum(self.segments[i].seconds for i in chosen)

    def least(self) -> float | None:
        numbers = range(len(self.segments))
        sets = itertools.chain.from_iterable(
            itertools.combinations(numbers, k) for k in (*numbers, len(numbers))
        )
        return min((self.seconds(c) for c in sets if self.peak(c) <= self.available), default=None)


def random_stage(seed: int, most: int = 12) -> Stage:
    """Alike segments or different ones, and anything between plenty and too little."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, most + 1))
    table = rng.integers([0, 1, 0, 0], [5, 10, 4, 12], (n, 4))
    if n and rng.random() < 0.3:
        table = table[rng.integers(0, min(n, 3), n)]
    segments = [Piece(*map(float, row)) for row in table.tolist()]
    in_flight = int(rng.integers(1, 5))
    most_bytes = in_flight * sum(s.kept for s in segments)
    return Stage(segments, in_flight, round(most_bytes * rng.uniform(0.1, 1.1)))


def check(stage: Stage) -> None:
    found, least = stage.choose(), stage.least()
    if found is None:
        assert least is None
        return
    assert found.bound == found.seconds == stage.seconds(found.segments) == least
    assert found.peak == stage.peak(found.segments) <= stage.available


SEEDS = st.integers(0, 2**40)


@settings(max_examples=300)
@given(SEEDS.map(random_stage))
def test_the_least_seconds_that_fit(stage: Stage) -> None:
    check(stage)


@pytest.mark.slow
@settings(max_examples=2000)
@given(SEEDS.map(random_stage))
def test_the_least_seconds_that_fit_two_thousand_times(stage: Stage) -> None:
    check(stage)


@settings(max_examples=100)
@given(SEEDS.map(lambda seed: random_stage(seed, most=9)), st.integers(0, 2**40))
def test_seconds_of_any_size(stage: Stage, seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments = [
        Piece(float(rng.lognormal(-5.0, 2.0)), s.kept, s.entry, s.working) for s in stage.segments
    ]
    changed = Stage(segments, stage.in_flight, stage.available)
    found, least = changed.choose(), changed.least()
    assert (found is None) == (least is None)
    if found is not None:
        assert found.seconds == pytest.approx(least, rel=1e-9)
        assert changed.peak(found.segments) <= changed.available


@pytest.fixture
def _short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the most promising choice is followed up."""
    monkeypatch.setattr(sys.modules[choose_recomputed.__module__], "MOST_CHOICES", 1)


@pytest.mark.usefixtures("_short_sighted")
def test_too_many_choices() -> None:
    """What is found fits, and is no further from the least than it says."""
    for stage in map(random_stage, range(300)):
        found, least = stage.choose(), stage.least()
        assert (found is None) == (least is None)
        if found is not None and least is not None:
            assert found.bound <= least <= found.seconds == stage.seconds(found.segments)
            assert found.peak == stage.peak(found.segments) <= stage.available


@pytest.mark.usefixtures("_short_sighted")
def test_what_was_not_followed_up_shows_in_the_bound() -> None:
    """The second alone would do, but the first saves more per second."""
    segments = [Piece(2.0, 5.0, 1.0, 7.0), Piece(4.0, 7.0, 0.0, 9.0)]
    found = choose_recomputed(segments, in_flight=4, available=38.0)
    assert found is not None
    assert (found.segments, found.seconds) == ((0, 1), 6.0)
    assert 2.0 < found.bound <= 4.0


def test_nothing_where_there_is_room() -> None:
    segments = [Piece(1.0, 10.0, 1.0, 50.0)] * 3
    assert choose_recomputed(segments, in_flight=2, available=60.0) == Recomputation(
        (), 0.0, 0.0, 60.0
    )
    assert choose_recomputed([], in_flight=1, available=0.0) == Recomputation((), 0.0, 0.0, 0.0)


def test_the_cheaper_one_with_a_large_working_set_does_not_pay() -> None:
    """The first is fast, but running it again takes all that it frees."""
    segments = [Piece(1.0, 10.0, 0.0, 10.0), Piece(5.0, 10.0, 0.0, 0.0)]
    assert choose_recomputed(segments, in_flight=1, available=19.0) == Recomputation(
        (1,), 5.0, 5.0, 10.0
    )


def test_only_the_largest_working_set_counts() -> None:
    """With one that is needed anyway, others with as large a set come for nothing."""
    segments = [Piece(1.0, 10.0, 0.0, 8.0), Piece(1.0, 10.0, 0.0, 8.0)]
    assert choose_recomputed(segments, in_flight=1, available=8.0) == Recomputation(
        (0, 1), 2.0, 2.0, 8.0
    )
    assert choose_recomputed(segments, in_flight=1, available=7.0) is None


def test_more_than_is_saved_may_be_held() -> None:
    """A segment that holds more to begin with than it frees is never recomputed."""
    segments = [Piece(0.0, 2.0, 5.0, 0.0), Piece(3.0, 8.0, 1.0, 2.0)]
    assert choose_recomputed(segments, in_flight=1, available=9.0) == Recomputation(
        (1,), 3.0, 3.0, 5.0
    )


def test_parts_of_bytes_are_rounded_to_the_safe_side() -> None:
    segments = [Piece(1.0, 10.0, 0.5, 0.25)]
    assert choose_recomputed(segments, in_flight=1, available=1.9) is None
    found = choose_recomputed(segments, in_flight=1, available=2.0)
    assert found is not None
    assert found.peak == 2.0


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_a_deep_stage_of_alike_blocks(spread: float) -> None:
    """Two hundred of two kinds, timed with noise: as few of the cheapest as are needed."""
    rng = np.random.default_rng(0)
    noise = 1 + spread * rng.random(200)
    segments = [
        Piece(float(noise[i] * (1 + i % 2)), 100.0 * (1 + i % 2), 10.0, 50.0) for i in range(200)
    ]
    found = choose_recomputed(segments, in_flight=4, available=50e3)
    assert found is not None
    assert found.bound == found.seconds
    assert found.peak <= 50e3
    spare = 50e3 - found.peak
    assert all(4 * (segments[i].kept - 10.0) > spare for i in found.segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_flight": 0}, "in_flight must be at least 1, got 0"),
        ({"available": -1.0}, "available must be finite and not negative, got -1.0"),
        (
            {"segments": [Piece(1.0, 1.0, 1.0, -2.0)]},
            "segment 0: working must be finite and not",
        ),
        (
            {"segments": [Piece(np.nan, 1.0, 1.0, 2.0)]},
            "segment 0: seconds must be finite and",
        ),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"segments": [], "in_flight": 1, "available": 1.0} | changes
    with pytest.raises(InputError, match=message):
        choose_recomputed(arguments.pop("segments"), **arguments)
