"""Finding the running pipelines of a user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.board import runs
from penstock.board.process import is_alive, started_at


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "penstock"


def pipeline(workers: str) -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    devices = ["cpu", "cpu"]
    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    return ps.Pipeline(model, (torch.ones(4, 3),), devices=devices, workers=workers, **options)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_pipeline_is_found_while_it_is_open(workers: str, folder: Path) -> None:
    with pipeline(workers):
        (run,) = runs.find()
        assert run.is_alive
        assert run.description.pid == os.getpid()
        assert run.description.model == "Sequential"
        assert [worker.stages for worker in run.description.workers] == [(0,), (1,)]
        assert len(runs.find(run.description.workers[1].pid)) == 1
        assert not runs.find(1)
        assert {path.stat().st_mode & 0o077 for path in folder.glob("*.board")} == {0}
    assert not runs.find()
    assert not list(folder.iterdir())


def test_what_a_killed_process_has_left_is_removed(folder: Path) -> None:
    script = (
        "import os, signal; from tests.board.test_runs import pipeline; "
        "pipe = pipeline('threads'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 3
    assert not runs.find()
    assert not list(folder.iterdir())


def test_a_process_of_the_same_number_is_another_one() -> None:
    assert is_alive(os.getpid(), started_at())
    assert not is_alive(os.getpid(), started_at() + 1)
    assert not is_alive(2**22 + 1, 0)


def test_what_is_no_board_is_left_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    name = f"{os.getpid()}-{started_at()}-0.json"
    (folder / name).write_text("{}")
    assert not runs.find()
    assert (folder / name).exists()  # its process runs, so somebody else has made it


def test_a_folder_that_others_can_read_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only he can read"):
        runs.folder()
    board = runs.new_board(2)  # and a pipeline works without it
    assert board.path is None
    assert not runs.find()
