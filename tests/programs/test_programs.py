"""Programs drawn at random, of which none may be wrong: `python -m tests.programs` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.programs.drawing import drawn
from tests.programs.running import Outcome, outcome

NEVER = ("wrong", "crash")


def ended(numbers: range) -> dict[int, Outcome]:
    """What has become of these programs, run without an audit: it is not what saves them."""
    return {number: outcome(drawn(number), audit=None) for number in numbers}


def bad(found: dict[int, Outcome]) -> dict[int, Outcome]:
    return {number: each for number, each in found.items() if each.verdict in NEVER}


def test_programs_drawn_at_random() -> None:
    found = ended(range(40))
    assert not bad(found)
    verdicts = Counter(each.verdict for each in found.values())
    assert verdicts["right"] > verdicts["refused"]  # or it would say little


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 2040, 250))
def test_many_programs_drawn_at_random(start: int) -> None:
    assert not bad(ended(range(start, start + 250)))
