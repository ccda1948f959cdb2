"""The staircases, drawn by hand for three stages and four micro-batches."""

from __future__ import annotations

import pytest

from penstock.schedule import Action, Kind, Schedule, build, draw

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
