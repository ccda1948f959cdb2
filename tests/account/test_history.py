"""What is known of a run: in memory, in its folder, and asked for by another process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account import keeping
from penstock.account.history import ABOUT, History, RunFolder, StepTime, read_run
from penstock.account.keeping import Kept
from penstock.board.control import SUFFIX, ask
from tests.support.traps import Trap, divide

X = torch.randn(16, 8)


def pipeline(**options: Any) -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return ps.Pipeline(
        model, (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1, audit=None, **options
    )


def train(pipe: ps.Pipeline, count: int) -> None:
    for _ in range(count):
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_a_folder_says_what_memory_does(tmp_path: Path) -> None:
    with pipeline(run=tmp_path / "a") as pipe:
        train(pipe, 40)
        known = pipe.history()
    found = read_run(tmp_path / "a")
    assert found.records == known.records
    assert [record.step for record in found.records] == [3, 4, 5, 6, 9, 17, 33]
    assert found.about == known.about
    assert found.about.plan == pipe.plan
    assert sum(times.steps for times in found.steps) == 40
    assert sum(times.rows for times in found.steps) == 40 * 16
    assert [t.step for t in found.steps] == [t.step for t in known.steps]
    assert all(t.slowest_seconds <= t.seconds for t in found.steps)


def test_a_run_that_goes_on_and_a_line_that_is_not_whole(tmp_path: Path) -> None:
    for _ in range(2):
        with pipeline(run=tmp_path) as pipe:
            train(pipe, 4)
    assert [record.step for record in read_run(tmp_path).records] == [3, 4, 3, 4]
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "beg')
    assert len(read_run(tmp_path).records) == 4


def test_what_happens_is_kept(tmp_path: Path) -> None:
    trap = Trap()
    model = nn.Sequential(nn.Linear(8, 8), trap, nn.Linear(8, 8))
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, run=tmp_path) as pipe:
        train(pipe, 1)
        trap.arm("forward", divide)
        with pytest.raises(ps.WorkerError):
            train(pipe, 1)
        assert "WorkerError" in pipe.status().notes[-1]
        assert "WorkerError" in str(pipe.status())
    [event] = read_run(tmp_path).events
    assert event.step == 1
    assert "forward of micro-batch" in event.what


def test_other_processes_ask_for_it() -> None:
    with pipeline() as pipe:
        train(pipe, 12)  # the next one that is recorded of itself is the 17th
        path = pipe._workers.board.path
        assert path is not None
        assert ask(path.with_suffix(SUFFIX), "record") == 9
        train(pipe, 2)
        found = msgspec.convert(ask(path.with_suffix(SUFFIX), "history"), History, str_keys=True)
        assert [record.step for record in found.records] == [3, 4, 5, 6, 9, 13]
        assert found == pipe.history()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ps.InputError, match=r"other files, such as thesis\.tex; give a new folder"):
        pipeline(run=tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.InputError, match="cannot be a folder"):
        pipeline(run=tmp_path / "file")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ps.InputError, match=r"not the folder of a run.*run\.json"):
        read_run(tmp_path / "nowhere")
    (tmp_path / ABOUT).write_text("{}")
    with pytest.raises(ps.InputError, match="is not what Pipeline"):
        read_run(tmp_path)
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 3)
    (tmp_path / "steps.jsonl").write_text("nonsense\n")
    with pytest.raises(ps.InputError, match=r"steps\.jsonl is not what"):
        read_run(tmp_path)
    about = msgspec.json.decode((tmp_path / ABOUT).read_bytes())
    (tmp_path / ABOUT).write_bytes(msgspec.json.encode({**about, "version": 7}))
    with pytest.raises(ps.InputError, match="version 7; this Penstock reads version 1"):
        read_run(tmp_path)


def test_a_disk_that_is_full_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, item: object) -> None:
        raise OSError(28, "No space left on device")

    with pipeline(run=tmp_path) as pipe:
        monkeypatch.setattr(RunFolder, "add", full)
        with pytest.warns(UserWarning, match=r"No space left.*the training goes on"):
            train(pipe, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(pipe, 3)
        assert len(pipe.history().records) == 4


def test_steps_that_end_together_are_noted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(keeping.time, "time", lambda: now)
    kept = Kept()
    for number, seconds in enumerate([0.3, 0.5, 0.1, 0.2, 0.4], start=1):
        now += seconds
        kept.step(number, seconds, seconds / 2, rows=4)
    kept.step(6, 2.5, 1.0, rows=4)
    with pipeline() as pipe:
        times = kept.history(pipe._about()).steps
    assert times[0] == StepTime(
        step=5,
        at=pytest.approx(101.5),
        steps=5,
        seconds=pytest.approx(1.5),
        pass_seconds=pytest.approx(0.75),
        slowest=2,
        slowest_seconds=0.5,
        rows=20,
    )
    assert (times[1].step, times[1].steps, times[1].seconds) == (6, 1, 2.5)
