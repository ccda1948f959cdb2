"""The live view of running pipelines."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.activity import (
    LOSS,
    RECOMPUTATION,
    SENDING,
    UPDATING,
    code,
    waiting,
    within,
)
from penstock.board.memory import Reading
from penstock.observe.watch import LEGEND, Watch, bar, mark, stack_of
from penstock.schedule import Action, Kind

pytestmark = pytest.mark.usefixtures("boards")


@pytest.fixture
def pipe() -> Iterator[ps.Pipeline]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    with ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu", "cpu"], **options) as pipe:
        yield pipe


def reading(doing: int) -> Reading:
    return Reading(doing, 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("doing", "shown"),
    [
        (code(Action(Kind.FORWARD, 0, 13), False), "3"),
        (code(Action(Kind.FORWARD, 0, 13), True), "."),
        (code(Action(Kind.BACKWARD, 0, 27), False), "b"),
        (UPDATING, "+"),
        (0, " "),
    ],
)
def test_what_is_seen_at_a_look(doing: int, shown: str) -> None:
    assert mark(reading(doing)) == shown


def test_bars_are_as_long_as_shares() -> None:
    assert bar(0.5, 0.3).plain == "█████▒▒▒··  50%"
    assert bar(1.0, 0.2).plain == "██████████ 100%"
    assert bar(0.0, 0.0).plain == "··········   0%"


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_screen(pipe: ps.Pipeline, width: int) -> None:
    watch = Watch()
    watch.find()
    watch.reckon()
    x = torch.ones(4, 3)
    for _ in range(3):
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        watch.look()
    watch.reckon()
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(watch.view(width, keys=True))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\n3 steps" in text
    assert "0 cpu" in text
    assert "q quit" in text
    assert ("peak" in text) == (width == 200)


def test_a_pipeline_that_ends_is_gone(pipe: ps.Pipeline) -> None:
    watch = Watch()
    watch.find()
    assert [status.model for status in watch.statuses()] == ["Sequential"]
    pipe.close()
    watch.find()
    assert not watch.jobs
    watch.view(80)


def test_stacks_are_asked_for(pipe: ps.Pipeline) -> None:
    watch = Watch()
    watch.find()
    watch.ask_for_stacks()
    (first, second) = watch.stacks.values()
    assert first.startswith("idle")
    assert "in _work" in second or "File" in second
    assert all("worker" in title for title in watch.stacks)


@pytest.mark.parametrize(("part", "shown"), [(LOSS, "L"), (RECOMPUTATION, "R"), (SENDING, ">")])
def test_parts_of_actions_have_signs(part: int, shown: str) -> None:
    doing = within(code(Action(Kind.BACKWARD, 2, 1), False), part)
    assert mark(reading(doing)) == shown
    assert f"{shown} " in LEGEND
    assert mark(reading(waiting(doing))) == "."


def test_stacks_begin_with_the_thread_that_works() -> None:
    stack = "idle (process 7)\nThread 1:\n  File a\n\nCurrent thread 2:\n  File b"
    lines = stack_of("worker 0", stack).plain.splitlines()
    assert lines[:3] == ["worker 0", "idle (process 7)", "Current thread 2:"]
    assert sorted(lines[1:]) == sorted(line for line in stack.splitlines() if line)
