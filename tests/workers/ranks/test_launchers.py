"""Ranks that nobody asked for are seen, whoever has started them; and runs that torchrun restarts
go on at the first attempt."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import penstock as ps
from penstock.workers.ranks.process_groups import attempt_of
from penstock.workers.ranks.rendezvous import _LAUNCHERS
from tests.support.models import mlp, uniform_plan
from tests.support.pool import pooled
from tests.workers.ranks import restarting
from tests.workers.ranks.launching import ROOT, Launcher, environment
from tests.workers.ranks.test_torchrun import assert_equal

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
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
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


def test_each_rank_may_have_a_pipeline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with ps.Pipeline(mlp(4, 4, 4), (X,), workers="threads", **CPUS) as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_a_process_group_that_nobody_asked_for(launcher: Launcher, tmp_path: Path) -> None:
    """That of Ray Train, say; asked for, it is used."""
    for rank, (alone, links) in enumerate(launcher.run("a_group", tmp_path)):
        assert alone[0] == "InputError"
        assert f"rank {rank} of 2 (torch.distributed has a process group)" in alone[1]
        assert links == ("shared memory",)


# -- restarts ---------------------------------------------------------------------------------


def attempt(store: dist.Store, ranks: Sequence[int], count: int, seconds: float = 10) -> list[Any]:
    """What becomes of some of the ranks of an attempt."""

    def one(rank: int) -> Any:
        try:
            part = attempt_of(store, rank, count, seconds)
            part.set(str(rank), b"here")
            return part.get(str((rank + 1) % count))
        except TimeoutError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_every_attempt_has_a_part_of_the_store_for_itself() -> None:
    """Whoever was there before, and however many."""
    store = dist.HashStore()
    for count in (3, 3, 2, 1, 4):
        assert attempt(store, range(count), count) == [b"here"] * count
    for some in ([0, 2], [1, 2], [0, 1]):  # attempts that ended before all were there
        for error in attempt(store, some, 3, 0.2):
            assert isinstance(error, TimeoutError)
        assert attempt(store, [2, 1, 0], 3) == [b"here"] * 3
    for _ in range(20):
        assert attempt(store, [2, 1, 0], 3) == [b"here"] * 3


@pytest.mark.parametrize(
    ("victim", "ranks"), [(0, 2), pytest.param(0, 3, marks=pytest.mark.slow),
                          pytest.param(1, 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_killed_rank_is_restarted_once(tmp_path: Path, victim: int, ranks: int) -> None:
    """The first restart goes on from the checkpoint, and ends with the bits of a run of threads."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--monitor-interval", "0.1", "--nproc-per-node", str(ranks)]
    command += [
        str(ROOT / "tests/workers/ranks/restarting.py"),
        str(tmp_path),
        str(victim),
        str(ranks),
    ]
    found = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    starts = {path.name for path in tmp_path.iterdir()} - {"run"}
    for rank in range(ranks):
        assert {f"{rank} from 0 in 0", f"{rank} from {restarting.KILLED} in 1"} <= starts
    model = restarting.parts(ranks)
    program = ps.capture(model, (restarting.X,))
    plan = uniform_plan(program, ranks, 2)
    with ps.Pipeline(
        model, (restarting.X,), devices=["cpu"] * ranks, program=program, plan=plan
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(restarting.STEPS):
            optimizer.zero_grad()
            pipe.train_step(restarting.X, target=restarting.X, loss_fn=F.mse_loss)
            optimizer.step()
        saved = ps.load(tmp_path / "run").model_state()
        for name, value in pipe.state_dict().items():
            assert torch.equal(saved[name], value), name


# -- a rank's own copy of the model -----------------------------------------------------------


def test_a_mixture_of_old_and_new_weights_is_not_given_out(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Lightning's `save_checkpoint` under torchrun stored one."""
    for found in launcher.run("stale", tmp_path):
        for name in ("model", "wrapper", "part", "pickled", "stepped", "again"):
            assert found[name][0] == "InputError", name
            assert "Call pipe.state_dict() on all ranks" in found[name][1], name
        for name in ("before", "copy", "live", "loaded"):
            assert found[name][0] == "", name
        assert_equal("state", *found["refreshed"])
        assert found["closed"]
        assert all("it had to be done before" in text for text in found["closed"])


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_step_without_gradients_is_said(kind: Any) -> None:
    """Lightning's automatic optimization clears them after `train_step`, and trained nothing."""
    with pooled(), ps.Pipeline(mlp(4, 4, 4), (X,), workers=kind, **CPUS) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match="finds no gradient and changes nothing"):
            optimizer.step()
        for parameter in pipe.parameters():
            parameter.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
