"""Ranks that nobody asked for are seen, whoever has started them; and runs that torchrun restarts
go on at the first attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.workers.joining import _LAUNCHERS
from tests.models import mlp
from tests.torchrun.test_torchrun import Launcher, launcher, started

__all__ = ["launcher"]  # a fixture

X = torch.randn(6, 4)
CPUS = {"devices": ["cpu"] * 2, "num_microbatches": 2}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in _LAUNCHERS:
        for name in (*pair, "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
    ],
    ids=lambda environment: next(iter(environment)),
)
@pytest.mark.parametrize("devices", [["cpu", "cpu"], None])
def test_ranks_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], devices: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ps.InputError,
        match=r'rank 1 of 2 \(.*=2 in the environment\).*workers="torchrun".*workers="threads"',
    ):
        ps.Pipeline(mlp(4, 4, 4), (X,), devices=devices)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # in the script of a batch, not by srun
        {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_processes_that_are_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with ps.Pipeline(mlp(4, 4, 4), (X,), **CPUS) as pipe:
        assert set(pipe.links) <= {"by reference"}
    with pytest.raises(ps.InputError, match=r"devices= is missing: give .*\"cpu\", \"cpu\""):
        ps.Pipeline(mlp(4, 4, 4), (X,))


def test_each_rank_may_have_a_pipeline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with ps.Pipeline(mlp(4, 4, 4), (X,), workers="threads", **CPUS) as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_a_process_group_that_nobody_asked_for(launcher: Launcher, tmp_path: Path) -> None:
    """That of Ray Train, say; asked for, it is used."""
    for rank, (alone, links) in enumerate(started(launcher, "a_group", tmp_path)):
        assert alone[0] == "InputError"
        assert f"rank {rank} of 2 (torch.distributed has a process group)" in alone[1]
        assert links == ("shared memory",)
