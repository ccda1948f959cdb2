"""What torch.profiler sees of a pipeline."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.phases import title_of
from penstock.observe.profiled import of_worker

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture
def pipe() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3))
    options: Any = {"cuts": ["1"], "schedule": "zero-bubble", "num_microbatches": 4, "replicas": 1}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, audit=None, **options) as pipe:
        yield pipe


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def by_thread(content: bytes) -> list[list[dict[str, Any]]]:
    """What was seen of every thread, in order."""
    threads = defaultdict(list)
    for event in json.loads(content)["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    return [sorted(own, key=lambda event: float(event["ts"])) for own in threads.values()]


def test_operators_of_workers_are_within_their_actions(pipe: ps.Pipeline, tmp_path: Path) -> None:
    with pipe.recording(profile=tmp_path / "step.json") as timelines:
        step(pipe)
    (timeline,) = timelines
    threads = by_thread((tmp_path / "step.json").read_bytes())
    for worker in range(2):
        events = sorted((e for e in timeline.events if e.worker == worker), key=lambda e: e.start)
        titles = [title_of(event.action) for event in events]
        own = [
            seen for seen in threads if [e["name"] for e in seen if "stage" in e["name"]] == titles
        ]
        assert len(own) == 1
        actions = [event for event in own[0] if "stage" in event["name"]]
        linear = [event for event in own[0] if event["name"] == "aten::addmm"]
        assert len(linear) == 4
        for event in linear:
            around = [a for a in actions if a["ts"] <= event["ts"] <= a["ts"] + a["dur"]]
            assert [a["name"].partition(" ")[0] for a in around] == ["forward"]


def test_it_changes_no_bit_and_ends_with_the_context(pipe: ps.Pipeline, tmp_path: Path) -> None:
    state = pipe.random_state()
    losses, gradients = [], []
    for profile in (None, tmp_path / "step.json.gz", None):
        pipe.load_random_state(state)
        pipe.zero_grad()
        with pipe.recording(profile=profile):
            losses.append(step(pipe))
        gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    assert torch.equal(losses[0], losses[1])
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert len(gradients[0]) == 4
    before = (tmp_path / "step.json.gz").read_bytes()
    assert by_thread(gzip.decompress(before))
    assert not torch.autograd.profiler._is_profiler_enabled


def test_errors(pipe: ps.Pipeline, tmp_path: Path) -> None:
    with (
        pytest.raises(ps.InputError, match=r"cannot write the trace to .*step\.json: No such"),
        pipe.recording(profile=tmp_path / "no" / "step.json") as timelines,
    ):
        step(pipe)
    assert len(timelines) == 1
    with (
        torch.profiler.profile(acc_events=True) as other,
        pytest.raises(ps.InputError, match="running already"),
        pipe.recording(profile=tmp_path / "step.json"),
    ):
        step(pipe)
    assert other.events() is not None


def test_what_fails_leaves_no_file_and_no_profiler(pipe: ps.Pipeline, tmp_path: Path) -> None:
    with (
        pytest.raises(ps.WorkerError),
        pipe.recording(profile=tmp_path / "step.json"),
    ):
        pipe.train_step(X, target=X, loss_fn=lambda y, t: 1 / 0)
    assert list(tmp_path.iterdir()) == []
    with pipe.recording(profile=tmp_path / "step.json") as timelines:
        step(pipe)
    assert len(timelines) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "step.json"]


def test_every_rank_has_its_own_file() -> None:
    assert of_worker("a/step.json.gz", 3) == Path("a/step-worker-3.json.gz")
    assert of_worker("a.b/step", 0) == Path("a.b/step-worker-0")
