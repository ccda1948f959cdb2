"""The staircases, drawn by hand."""

from __future__ import annotations

import importlib
from itertools import groupby

import pytest

from penstock.schedule import Action, Costs, Kind, Rules, Schedule, build, draw

STAIRCASES = {
    "naive": """
worker 0 | F0 .. .. .. .. B0 F1 .. .. .. .. B1 F2 .. .. .. .. B2 F3 .. .. .. .. B3
worker 1 | .. F0 .. .. B0 .. .. F1 .. .. B1 .. .. F2 .. .. B2 .. .. F3 .. .. B3 ..
worker 2 | .. .. F0 B0 .. .. .. .. F1 B1 .. .. .. .. F2 B2 .. .. .. .. F3 B3 .. ..
""",
    "gpipe": """
worker 0 | F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
worker 1 | .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
worker 2 | .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..
""",
    "1f1b": """
worker 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
worker 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
""",
    "eager-1f1b": """
worker 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
worker 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
""",
}


@pytest.mark.parametrize("name", sorted(STAIRCASES))
def test_draws_the_staircase(name: str) -> None:
    assert draw(build(name, 3, 4)) == STAIRCASES[name].strip("\n")


MIDDLE_TWICE_AS_SLOW = build(
    "fitted",
    3,
    4,
    costs=Costs((1.0, 2.0, 1.0), (2.0, 4.0, 2.0), (1.0, 2.0, 1.0)),
    rules=Rules((4, 4, 4), (3, 2, 1), split=True),
)
IN_DOCSTRINGS = [
    ("gpipe", 0, build("naive", 3, 2)),
    ("gpipe", 1, build("gpipe", 3, 4)),
    ("one_f_one_b", 0, build("1f1b", 3, 4)),
    ("one_f_one_b", 1, build("eager-1f1b", 3, 4)),
    ("looped", 0, build("breadth-first", 4, 3, num_workers=2)),
    ("looped", 1, build("interleaved", 4, 4, num_workers=2)),
    ("zero_bubble", 0, build("zero-bubble", 3, 4)),
    ("zero_bubble", 1, build("zero-bubble-v", 4, 3)),
    ("fitted", 0, MIDDLE_TWICE_AS_SLOW),
]


@pytest.mark.parametrize(("module", "index", "schedule"), IN_DOCSTRINGS)
def test_the_docstrings_draw_what_is_built(module: str, index: int, schedule: Schedule) -> None:
    """A line that ends in three dots goes on."""
    found = staircases(importlib.import_module(f"penstock.schedule.{module}").__doc__ or "")[index]
    drawn = draw(schedule).splitlines()
    assert len(found) == len(drawn)
    for line, whole in zip(found, drawn, strict=True):
        shown = line.removesuffix(" ...")
        assert whole == line or (shown != line and whole.startswith(shown)), whole


def test_every_staircase_of_a_docstring_is_compared() -> None:
    for module in {module for module, _, _ in IN_DOCSTRINGS}:
        text = importlib.import_module(f"penstock.schedule.{module}").__doc__ or ""
        assert len(staircases(text)) == sum(module == other for other, _, _ in IN_DOCSTRINGS)


def staircases(text: str) -> list[list[str]]:
    """The blocks of lines that begin with `worker`."""
    lines = [line.strip() for line in text.splitlines()]
    groups = groupby(lines, key=lambda line: line.startswith("worker ") and " | " in line)
    return [list(block) for drawn, block in groups if drawn]


def test_fewer_microbatches_than_stages() -> None:
    assert draw(build("1f1b", 3, 1)).splitlines() == [
        "worker 0 | F0 .. .. .. .. B0",
        "worker 1 | .. F0 .. .. B0 ..",
        "worker 2 | .. .. F0 B0 .. ..",
    ]


def test_wide_numbers_stay_aligned() -> None:
    lines = draw(build("gpipe", 11, 11)).splitlines()
    assert lines[0].startswith("worker  0 | F0  F1  F2 ")
    assert lines[10].startswith("worker 10 | ..  ..  .. ")
    assert lines[0].index("F10") == lines[0].index("F0") + 4 * 10
    assert lines[1].index("F10") == lines[0].index("F10") + 4


def test_names_the_stage_where_a_worker_has_several() -> None:
    both = tuple(
        Action(kind, stage, 0)
        for kind, stage in [
            (Kind.FORWARD, 0),
            (Kind.FORWARD, 1),
            (Kind.BACKWARD, 1),
            (Kind.BACKWARD, 0),
        ]
    )
    assert draw(Schedule("by hand", 2, 1, (both,))) == "worker 0 | F0.0 F1.0 B1.0 B0.0"
