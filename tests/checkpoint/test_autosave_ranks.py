"""Ranks save by themselves, end at the same step, and go on from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock as ps
from tests.checkpoint.autosaving import EPOCHS, ROWS, Run
from tests.workers.ranks.launching import Launcher
from tests.workers.ranks.test_torchrun import assert_equal

STEPS = EPOCHS * ROWS // 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of threads that nobody disturbs."""
    run = Run(tmp_path_factory.mktemp("whole"), workers="threads")
    run.go()
    return run


def assert_is(whole: Run, seen: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert len(seen) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(seen, whole.seen, strict=True))
    assert_equal("weights", weights, whole.weights)


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_batch_is_lost_or_repeated(
    launcher: Launcher, tmp_path: Path, whole: Run, ranks: int
) -> None:
    for found, seen, weights in launcher.run("autosaves:autosaved", tmp_path, ranks):
        assert found == {}
        assert_is(whole, seen, weights)


@pytest.mark.parametrize(("who", "ranks"), [(0, 2), (2, 3)])
def test_all_stop_at_the_same_step(
    launcher: Launcher, tmp_path: Path, whole: Run, who: int, ranks: int
) -> None:
    """With the step of which all know that one was asked, though it was not time to save."""
    for code, steps, batches, seen, weights in launcher.run(
        f"autosaves:asked:{who}", tmp_path, ranks
    ):
        assert (code, steps, batches) == (0, 4, 4)
        assert_is(whole, seen, weights)


def test_ranks_of_another_agent_are_started_again(launcher: Launcher, tmp_path: Path) -> None:
    """They have not been asked, so their agent is not to take the run for one that has ended."""
    first, second = launcher.run("autosaves:asked_elsewhere", tmp_path)
    assert first == 0
    assert second.startswith("penstock: another machine was asked to stop by SIGTERM")
    assert "after 4 steps" in second


def test_saves_agree(launcher: Launcher, tmp_path: Path) -> None:
    """Before the last batch, as every earlier one, of which each has two passes."""
    for failed, steps in launcher.run("autosaves:saves_agree", tmp_path):
        assert failed == ["InputError"]
        assert steps == STEPS
    assert ps.load(tmp_path / "run").batches == 2 * (STEPS - 1) + 1  # with one that has failed


def test_all_go_on_from_the_same_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    for nothing, found, warned in launcher.run("autosaves:resumed", tmp_path):
        assert nothing is None
        assert found == {"name": "a"}
        assert len(warned) == 1
        assert "it is not here yet. An older one is looked for" in warned[0]
