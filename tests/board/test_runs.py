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
from penstock.board.process import is_alive, started_at, where


@pytest.fixture(autouse=True)
def folder(boards: Path) -> Path:
    return boards


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
    assert all(path.suffix == ".dump" for path in folder.iterdir())  # it is the process's


def test_what_a_killed_process_has_left_is_removed(folder: Path) -> None:
    script = (
        "import os, signal; from tests.board.test_runs import pipeline; "
        "pipe = pipeline('threads'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 4  # board, description, socket, stacks
    assert not runs.find()
    assert not list(folder.iterdir())


def test_a_process_of_the_same_number_is_another_one() -> None:
    assert is_alive(os.getpid(), started_at())
    assert not is_alive(os.getpid(), started_at() + 1)
    assert not is_alive(2**22 + 1, 0)


def test_what_is_no_board_is_left_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    mine = f"{where()}-{os.getpid()}-{started_at()}-0"
    (folder / f"{mine}.json").write_text("{}")
    (folder / f"{where()}-1-1-0.board").mkdir()  # which cannot be unlinked
    elsewhere = folder / "0-2-1-0.board"  # of a container that shares the folder
    elsewhere.touch()
    assert not runs.find()
    assert (folder / f"{mine}.json").exists()  # its process runs, so somebody else has made it
    assert elsewhere.exists()
    assert runs.new_board(1).path is not None


def test_a_folder_that_others_can_read_is_not_used(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o755)
    there = tmp_path / "tmp" / f"penstock-{os.getuid()}"
    board = runs.new_board(2)
    assert board.path is not None
    assert board.path.parent == there  # the other place
    there.chmod(0o755)
    assert runs.new_board(2).path is None  # and a pipeline works without it
    assert not runs.find()


def test_both_places_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have been started without the variable of a login."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    with pipeline("threads"):
        assert len(runs.find()) == 1
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
        assert len(runs.find()) == 1


def test_an_argument_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "a\udcff"])
    with pipeline("threads"):
        assert runs.find()[0].description.command == "train.py a?"


def test_a_full_disk_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    board = runs.new_board(1)
    assert board.path is None
    board.records[0].note(1)
