"""What an actor does with jobs that are given up, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.workers.ray.actor import Actor
from penstock.workers.ray.pickled import pickled

GIVEN_UP = {"earlier": 4, "this": 5, "later": 6}


@pytest.mark.parametrize("which", GIVEN_UP)
def test_who_is_interrupted(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is given up late disturbs none that came after it."""
    actor = Actor(0)
    interrupted = []
    monkeypatch.setattr(actor._state, "interrupt", lambda: interrupted.append(which))
    actors[0] = actor
    assert not actor.do(5, "", pickled(give_up(GIVEN_UP[which]))).failed
    assert interrupted == ([] if which == "earlier" else [which])
    assert actor.do(
        4, "", pickled(give_up(3))
    ).failed  # it was given up before it began, or is late


actors: dict[int, Actor] = {}


class give_up:  # noqa: N801 - a job, as those of the script are
    """Have jobs up to this number given up while this one runs."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, state: Any) -> None:
        actors[0].give_up(self.number)
