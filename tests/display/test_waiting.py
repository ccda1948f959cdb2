"""A long start shows what it does, where a person looks on and nowhere else."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.display import terminal as waiting
from tests.support.models import mlp

X = torch.randn(8, 6)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What is on stderr from here on, as if it was a terminal's."""
    found = Screen()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(waiting, "_PATIENCE", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    return found


def test_building_is_shown_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = looked_at(monkeypatch)
    ps.Pipeline(mlp(6, 6, 6), (X,), devices=2, replicas=1).close()
    said = screen.getvalue()
    assert "\rpenstock: recording what Sequential does" in said
    assert "\rpenstock: profiling" in said
    assert said.split("Sequential")[0].startswith("\r")
    assert "\n" not in said.replace(said.split("\r")[-1], "")
    assert waiting.is_watched()


def test_what_takes_no_time_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = looked_at(monkeypatch)
    monkeypatch.setattr(waiting, "_PATIENCE", 60.0)
    with waiting.showing("auto") as told:
        assert told is not None
        told(1, 2, "a moment")
    assert screen.getvalue() == ""


def test_what_says_nothing_for_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = looked_at(monkeypatch)
    monkeypatch.setattr(waiting, "_PATIENCE", 0.1)
    with waiting.showing("auto") as told:
        assert told is not None
        told(1, 20, "thinking")
        deadline = time.monotonic() + 20
        while not screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert screen.getvalue() == "\rpenstock: thinking (1/20)"
    assert screen.getvalue().endswith(" \r")


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at(monkeypatch)
    with waiting.showing(None) as told:
        assert told is None
    monkeypatch.setenv("RANK", "1")
    assert not waiting.is_watched()
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with waiting.showing("auto") as told:
        assert told is None


@pytest.mark.parametrize("progress", [True, "yes", 3])
def test_what_is_no_progress(progress: Any) -> None:
    with pytest.raises(ps.InputError, match=r'neither "auto", nor None, nor a function'):
        ps.Pipeline(mlp(6, 6, 6), (X,), devices=2, progress=progress, replicas=1)
