"""Ranks of torchrun save their own parts, and go on from anybody's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.storage.folder import SAVING
from tests.checkpoint.steps import Run, uninterrupted
from tests.workers.ranks.launching import Launcher
from tests.workers.ranks.test_torchrun import assert_equal


@pytest.mark.usefixtures("launcher")
def test_ranks(launcher: Launcher, tmp_path: Path) -> None:
    run = Run(workers="threads", devices=["cpu"] * 2)
    with run.pipe:
        run.go(3)
        run.save(tmp_path / "threads")
    expected = uninterrupted(6)
    ranks = launcher.run("checkpoints", tmp_path)
    for rank, found in enumerate(ranks):
        for what in ("uninterrupted", "resumed", "from threads"):
            assert_equal(f"rank {rank}, {what}", found[what], expected)
        for what, kind in (("not saved", "Input"), ("no folder", "Check"), ("missing", "Input")):
            assert found[what][0].startswith(kind), found[what]
    assert "position= cannot be saved" in ranks[0]["not saved"][1]
    assert [path.name for path in (tmp_path / "bad").iterdir()] == [SAVING]
    run = Run(3, workers="threads", devices=["cpu"] * 3)
    with run.pipe:
        run.restore(tmp_path / "ranks")
        run.go(3)
        assert_equal("threads", run.state(), expected)
    checkpoint = ps.load(tmp_path / "ranks")
    assert checkpoint.number == 2
    assert {file.partition("-")[0] for file in checkpoint._files} == {
        *("model", "optimizer", "training", "random", "plan"),
    }
    assert len(set(checkpoint._weights.values())) == 2
    assert ps.load(tmp_path / "at the end").batches == 6


def test_averages_of_all_ranks_are_saved(launcher: Launcher, tmp_path: Path) -> None:
    for saved, gathered in launcher.run("averages", tmp_path):
        assert saved.pop("n_averaged") == 3
        assert_equal("averages", saved, gathered)
        assert not torch.equal(gathered["0.bias"], gathered["2.bias"])


@pytest.mark.usefixtures("launcher")
def test_a_save_may_take_longer_than_a_pass(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run("slow_to_save", tmp_path) == [2, 2]
