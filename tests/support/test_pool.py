"""Worker processes that tests share are as new for each; others are replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.workers.processes import backend
from tests.support import pool
from tests.support.models import mlp
from tests.support.pool import POOL, Pooled, lend, pooled
from tests.workers.processes.test_process_memory import ask

X = torch.randn(6, 4)


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests here spoil what they get, so they get their own."""
    own: list[Pooled] = []
    monkeypatch.setattr(pool, "POOL", own)
    with pooled():
        yield
    while own:
        own.pop().really_close()


def pipeline() -> ps.Pipeline:
    return ps.Pipeline(
        mlp(4, 4, 4), (X,), devices=["cpu"] * 2, num_microbatches=2, workers="processes", replicas=1
    )


def pids_of(pipe: ps.Pipeline) -> list[int]:
    return list(pipe._runner.workers._pool.pids)  # type: ignore[attr-defined]


def test_the_next_test_gets_the_same_processes_and_finds_nothing_in_them() -> None:
    with pipeline() as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        first = pids_of(pipe)
    workers = lend(2, lambda: None)
    assert workers.pids == first

    def left(own: Any) -> list[str]:
        return [n for n in ("assemblies", "tensors", "links", "modules") if getattr(own, n)]

    assert workers.run([left] * 2, 60.0) == [[], []]
    workers.close()


def changes_settings(own: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    os.chdir("/")


def test_settings_are_put_back() -> None:
    def look(own: Any) -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.initial_seed(), os.getcwd()

    workers = lend(2, lambda: None)
    before, pids = workers.run([look] * 2, 60.0), workers.pids
    workers.run([changes_settings] * 2, 60.0)
    workers.close()
    again = lend(2, lambda: None)
    assert again.pids == pids
    assert again.run([look] * 2, 60.0) == before
    again.close()


def leaves_a_file(own: Any) -> None:
    own.forgotten = os.open("/dev/null", os.O_RDONLY)


def leaves_a_thread(own: Any) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.mark.parametrize("spoil", [leaves_a_file, leaves_a_thread])
def test_workers_that_keep_something_are_really_closed(spoil: Any) -> None:
    workers = lend(2, lambda: None)
    workers.run([spoil] * 2, 60.0)
    workers.close()
    assert all(Path(f"/proc/{pid}").exists() for pid in workers.pids)
    again = lend(2, lambda: None)
    assert not set(again.pids) & set(workers.pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.pids)
    again.close()


def test_dead_workers_are_replaced() -> None:
    workers = lend(2, lambda: None)
    workers.close()
    os.kill(workers.pids[0], signal.SIGKILL)
    again = lend(2, lambda: None)
    assert not set(again.pids) & set(workers.pids)
    again.close()


def test_without_the_pool_closing_really_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.workers.processes.pool import ProcessPool

    monkeypatch.setattr(backend, "ProcessPool", ProcessPool)
    with pipeline() as pipe:
        pids = pids_of(pipe)
        assert ask(pipe, lambda own: os.getpid()) == pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert POOL == pool.POOL or not any(set(w.pids) & set(pids) for w in POOL)
