"""Programs drawn at random, of which none may be wrong: `python -m tests.programs` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.bench.guarded import unguarded
from tests.programs.drawing import drawn, drawn_for_replicas
from tests.programs.running import NEVER, Outcome, outcome


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


def test_the_audit_finds_what_nobody_looks_at() -> None:
    """The audit alone stops what is wrong if guards are off, and module-level variables change."""
    programs = [drawn(number, hidden=True, steps=20) for number in range(5000, 5020)]
    with unguarded():
        without = [outcome(program, audit=None) for program in programs]
        wrong = [p for p, each in zip(programs, without, strict=True) if each.verdict == "wrong"]
        audited = [outcome(program, audit="auto") for program in wrong]
    assert len(wrong) > 5
    assert all(each.why.startswith("AuditError") for each in audited)


JUST = ("rows depend on the other rows of the batch", "are to be recomputed, which would disturb")
"""Why programs are refused: results that cannot be put together, and what replicas do not do."""


def on_replicas(numbers: range) -> Counter[str]:
    """What has become of programs on any number of replicas, none of them bad."""
    found = {number: outcome(drawn_for_replicas(number), audit=None) for number in numbers}
    assert not bad(found)
    refused = {number: each for number, each in found.items() if each.verdict == "refused"}
    assert not {n: e.why for n, e in refused.items() if not any(why in e.why for why in JUST)}
    return Counter(each.verdict for each in found.values())


@pytest.mark.usefixtures("pool")
def test_programs_on_any_number_of_replicas() -> None:
    assert on_replicas(range(8))["right"] >= 5


@pytest.mark.slow
@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("start", range(8, 488, 40))
def test_many_programs_on_any_number_of_replicas(start: int) -> None:
    assert on_replicas(range(start, start + 40))["right"] >= 25
