"""Worker processes that cannot write, or end, while a checkpoint is being written."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

import penstock as ps
from tests.checkpoint.steps import Run, uninterrupted
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
