"""What keys do in the live view, without a terminal."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.observe import on_demand
from penstock.observe.live import LiveView
from penstock.observe.on_demand import Task, free_path, history_of, record_step, save_timeline
from penstock.observe.watch import Watch

pytestmark = pytest.mark.usefixtures("boards")
X = torch.ones(4, 3)


@pytest.fixture
def pipes() -> Iterator[list[ps.Pipeline]]:
    """Two pipelines, the second with a model of another class."""
    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    with (
        ps.Pipeline(layers(nn.Sequential), (X,), devices=["cpu", "cpu"], **options) as first,
        ps.Pipeline(layers(Second), (X,), devices=["cpu", "cpu"], **options) as second,
    ):
        yield [first, second]


class Second(nn.Sequential):
    """So that it is told from the first."""


def layers(kind: type[nn.Sequential]) -> nn.Sequential:
    return kind(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def view_of(folder: Path) -> LiveView:
    watch = Watch()
    watch.find()
    return LiveView(watch, 0.1, False, folder)


def shown(view: LiveView, width: int = 120, height: int = 50) -> str:
    """What is on the screen, which it fits."""
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    view.look()
    console.print(view.screen(console))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    return "\n".join(lines)


def until(view: LiveView, holds: Callable[[str], bool], step: Callable[[], object]) -> str:
    """What is on the screen once that holds; steps go on meanwhile."""
    end = time.monotonic() + 60
    while not holds(text := shown(view)):
        assert time.monotonic() < end, text
        step()
        time.sleep(0.02)
    return text


def train(pipe: ps.Pipeline) -> None:
    pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_a_key_records_the_next_step(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    view = view_of(tmp_path)
    for _ in range(9):
        train(pipes[1])
    assert view.press("2")
    assert view.press("t")
    assert view.press("t")  # which changes nothing
    assert "of Second" in until(view, lambda text: "waiting for the next step" in text, list)
    text = until(view, lambda text: "wrote the timeline" in text, lambda: train(pipes[1]))
    (path,) = tmp_path.glob("timeline-*.pftrace")
    assert path.name in text
    step = int(path.stem.split("-")[2])
    assert step > 9
    assert f"of step {step} to" in text
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    names = {p.track_descriptor.process.process_name for p in trace.packet}
    assert {"measured", "predicted"} <= names
    slices = {p.track_event.name for p in trace.packet}
    assert {"loss", "wait for worker 0", "forward 1 in stage 1"} <= slices
    assert not view.press("q")


def test_numbers_select_a_pipeline(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    view = view_of(tmp_path)
    assert "[1] Sequential" in shown(view)
    view.press("2")
    assert "[2] Second" in shown(view)
    view.press("3")  # which there is not
    view.press("x")
    assert "[2] Second" in shown(view)
    assert "1-9 select" in shown(view)
    pipes[0].close()
    text = until(view, lambda text: "Sequential" not in text, list)
    assert "Second" in text
    assert "[" not in text  # it is the only one
    assert "1-9 select" not in text


def test_stacks_are_of_the_selected_one(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    view = view_of(tmp_path)
    view.press("s")
    text = until(view, lambda text: "worker 1\n" in text, list)
    assert "Second" not in text
    view.press("2")
    text = until(view, lambda text: "[2] Second" in text and "worker 1\n" in text, list)
    assert "Sequential" not in text
    assert "q quit" in shown(view, 80, 24)
    view.press("s")
    assert "worker 1\n" not in shown(view)


def test_nothing_changes_while_it_is_paused(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    view = view_of(tmp_path)
    before = shown(view)
    assert "\n2 steps" not in before
    view.press(" ")
    train(pipes[0])
    train(pipes[0])
    assert "paused" in shown(view)
    train(pipes[0])
    assert "\n3 steps" not in shown(view)
    view.press(" ")
    assert "\n3 steps" in shown(view)
    assert "paused" not in shown(view)


@pytest.mark.parametrize("height", [3, 8, 24])
def test_the_footer_is_always_there(pipes: list[ps.Pipeline], tmp_path: Path, height: int) -> None:
    assert pipes
    view = view_of(tmp_path)
    text = shown(view, 80, height)
    assert "q quit" in text.splitlines()[-1]
    assert ("do not fit" in text) == (height < 10)
    view.press("s")
    until(view, lambda _: bool(view._watch.stacks), list)
    text = shown(view, 80, height)
    assert "q quit" in text.splitlines()[-1]
    assert "do not fit" in text


def test_a_step_under_way_is_drawn_on_wide_screens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.observe.staircase._SHORT", 0.0)
    begun, go_on = threading.Event(), threading.Event()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(60)
        return F.mse_loss(output, target)

    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    with ps.Pipeline(layers(Second), (X,), devices=["cpu", "cpu"], **options) as pipe:
        view = view_of(tmp_path)
        step = threading.Thread(
            target=pipe.train_step, args=(X,), kwargs={"target": X, "loss_fn": loss}
        )
        step.start()
        try:
            assert begun.wait(60)
            beyond = re.compile(r"^worker 1 \|.*\| *L+$", re.MULTILINE)  # the predicted end
            text = until(view, lambda text: bool(beyond.search(text)), list)
            assert "the pass under way" in text
            assert "loss 0 stage 1" in text
            assert "loss of micro-batch 0 in stage 1" in shown(view, 200)
            assert "worker 1 |" not in shown(view, 99)
            assert "worker 1 |" not in shown(view, 120, 12)
        finally:
            go_on.set()
            step.join()


def test_a_report_needs_its_module(
    pipes: list[ps.Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pipes
    monkeypatch.setitem(sys.modules, "penstock.observe.report", None)
    view = view_of(tmp_path)
    view.press("r")
    until(view, lambda text: "there can be no report without" in text, list)
    assert not list(tmp_path.glob("*.html"))


def test_a_trace_needs_perfetto(
    pipes: list[ps.Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pipes
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    view = view_of(tmp_path)
    view.press("t")
    until(view, lambda text: "pip install 'penstock[trace]'" in text, list)


def test_no_step_and_no_pipeline(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    watch = Watch()
    watch.find()
    (first,), _ = watch.jobs
    with pytest.raises(ps.PenstockError, match="no training step began and ended within 0 s"):
        record_step([first], patience=0.3)
    pipes[0].close()
    with pytest.raises(ps.PenstockError, match="does not answer"):
        save_timeline([first], tmp_path / "a.pftrace")
    assert not (tmp_path / "a.pftrace").exists()


def test_a_pipeline_that_is_closed_has_no_timeline(
    pipes: list[ps.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    watch.find()
    (first,), _ = watch.jobs
    monkeypatch.setattr(on_demand.time, "sleep", lambda _: pipes[0].close())
    with pytest.raises(ps.PenstockError, match="was closed"):
        record_step([first])


def test_the_history_of_another_process(pipes: list[ps.Pipeline]) -> None:
    for _ in range(6):
        train(pipes[0])
    watch = Watch()
    watch.find()
    found, own = history_of(watch.jobs[0][0]), pipes[0].history()
    assert found.about.plan == pipes[0].plan
    assert found.records
    assert [each.timeline for each in found.records] == [each.timeline for each in own.records]


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    for name in ("a.html", "a-2.html", "a-3.html"):
        path = free_path(tmp_path, "a", ".html")
        assert path == tmp_path / name
        path.touch()


def test_what_a_task_raises_is_its_line() -> None:
    def fails() -> str:
        raise KeyError("what")

    task = Task("begins", fails)
    end = time.monotonic() + 60
    while not task.is_done:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert task.text == "KeyError: 'what'"
