"""Worker processes that cannot write, or end, while a checkpoint is being written."""

from __future__ import annotations

import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.cadence import wait_until
from penstock.checkpoint import saver
from penstock.storage import folder, part
from tests.checkpoint.steps import Run, uninterrupted
from tests.pipeline.test_on_failure import Looking
from tests.support.models import uniform_plan
from tests.workers.ranks.test_torchrun import assert_equal


def limit_files(pids: list[int], size: int) -> None:
    """Files that these processes write may have so many bytes."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_worker_that_cannot_write_and_one_that_ends(tmp_path: Path) -> None:
    run = Run(workers="processes", devices=["cpu"] * 2)
    with run.pipe:
        workers = run.pipe._runner.workers
        pids = workers._pool.pids  # type: ignore[attr-defined]
        run.go(2)
        run.save(tmp_path)
        limit_files(pids[1:], 2000)
        with pytest.raises(ps.CheckpointError, match=r"part 2 of 2 .*: .*before it is untouched"):
            run.save(tmp_path)
        save = run.save(tmp_path, background=True)
        with pytest.raises(ps.CheckpointError, match="part 2 of 2"):
            save.wait()
        limit_files(pids[1:], resource.RLIM_INFINITY)
        run.go(1)
        assert ps.load(tmp_path).batches == 2
        run.go(1)
        run.save(tmp_path)
        run.go(1)
        run.restore(tmp_path)
        run.go(2)
        assert_equal("goes on", run.state(), uninterrupted(6))
        assert workers.all_alive()
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while workers.all_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not workers.all_alive()
        with pytest.raises(ps.WorkerError, match="SIGKILL"):
            run.save(tmp_path, background=True)
    model = run.pipe.model
    assert ps.load(tmp_path).batches == 4
    ps.load(tmp_path).restore(model, optimizer=None, scheduler=None, generator=None)
    assert torch.isfinite(model[0][0].weight).all()


class Counted(nn.Linear):
    """Counts its calls, and says so in its state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_what_modules_have_counted_in_workers_is_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), Counted(6, 6))
    options = {"replicas": 1, "cuts": ["1"], "num_microbatches": 2, "audit": None}
    before = model[1].calls
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, workers="processes", **options) as pipe:
        for _ in range(3):
            pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
        pipe.save(tmp_path / "saved")
    assert ps.load(tmp_path / "saved").model_state()["1._extra_state"] == before + 6


X = torch.randn(4, 6)


def sync_slowly(path: Path) -> None:
    time.sleep(2)
    folder.sync(path)


def write_slowly(x: torch.Tensor, driver: int) -> None:
    """Let a worker's process take its time to write its part of a checkpoint."""
    if os.getpid() != driver:
        part.sync = sync_slowly  # type: ignore[attr-defined]


def slow_to_write() -> ps.Pipeline:
    look = partial(write_slowly, driver=os.getpid())
    model = nn.Sequential(*(nn.Sequential(Looking(look), nn.Linear(6, 6)) for _ in range(2)))
    program = ps.capture(model, (X,))
    return ps.Pipeline(
        model,
        program=program,
        plan=uniform_plan(program, 2, 2),
        devices=["cpu"] * 2,
        workers="processes",
        on_failure="replace",
    )


def step(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    pipe.train_step(X, target=X, loss_fn=F.mse_loss)
    optimizer.step()
    optimizer.zero_grad()


def test_a_worker_that_is_asked_to_end_writes_its_part_first(tmp_path: Path) -> None:
    with slow_to_write() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe, optimizer)
        save = pipe.save(tmp_path, background=True)
        os.kill(pipe.members[1].pid, signal.SIGTERM)
        step(pipe, optimizer)
        step(pipe, optimizer)
        assert pipe.members.number == 1
        save.wait()
    assert ps.load(tmp_path).batches == 1


def test_a_save_that_is_lost_with_a_worker_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next step, and not only when the next one is due."""
    monkeypatch.setattr(saver, "_LOST", 0.5)
    with slow_to_write() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.autosave(tmp_path, every=4, on_sigterm=False)
        for _ in range(5):
            step(pipe, optimizer)
        lost = pipe._saver._current
        assert lost is not None
        os.kill(pipe.members[1].pid, signal.SIGKILL)
        step(pipe, optimizer)
        assert wait_until(lambda: lost.done, 60, 0.01)
        with pytest.warns(UserWarning, match=r"a worker has ended .* This save is given up"):
            step(pipe, optimizer)
        with pytest.raises(ps.CheckpointError, match="a worker has ended"):
            lost.wait()
    assert ps.load(tmp_path).batches == 6
