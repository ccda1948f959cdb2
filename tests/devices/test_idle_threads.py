"""Threads of operations that idle beside the script's thread go before workers compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.devices import cores
from penstock.devices.cores import end_idle_threads

pytestmark = pytest.mark.skipif(
    cores.cores() < 2 or cores._gnu_openmp() is None, reason="operations have no threads to end"
)
X = torch.randn(8, 6)


def threads_now() -> set[str]:
    """The threads that this process has: others' may end at any time, so they are not counted."""
    return set(os.listdir("/proc/self/task"))


def are_gone(since: set[str]) -> bool:
    """Whether all threads begun since then are gone before long: they end by themselves."""
    deadline = time.monotonic() + 10
    while threads_now() - since and time.monotonic() < deadline:
        time.sleep(0.001)
    return not threads_now() - since


def compute() -> torch.Tensor:
    """An operation that is divided among all threads of the one that calls it."""
    return torch.ones(2_000_000).exp()


def with_two_threads(body: Callable[[], None]) -> None:
    """Run this in a thread whose operations are divided in two."""
    run_with_threads(body, 2)


def test_they_end_and_come_back_with_the_next_operation() -> None:
    def body() -> None:
        before = threads_now()
        expected = compute()
        assert len(threads_now() - before) == 1
        end_idle_threads(2)
        assert are_gone(since=before)
        end_idle_threads(2)
        assert torch.equal(compute(), expected)
        assert len(threads_now() - before) == 1

    with_two_threads(body)


def test_a_pass_ends_those_of_the_script() -> None:
    """With a timeout, another thread runs the pass."""

    def body() -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        with ps.Pipeline(model, (X,), devices=["cpu"], audit=None, timeout=60.0) as pipe:
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            before = threads_now()
            compute()
            assert len(threads_now() - before) == 1
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            assert are_gone(since=before)

    with_two_threads(body)


def test_a_pass_of_the_script_s_own_thread_ends_those_of_the_worker() -> None:
    x = torch.randn(8192, 64)  # its operations are divided

    def body() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        options = {"devices": ["cpu"], "num_microbatches": 1, "threads_per_worker": 2}
        with ps.Pipeline(model, (x,), audit=None, **options) as pipe, torch.no_grad():
            pipe(x)
            before = threads_now()
            list(pipe.map([x]))
            of_worker = threads_now() - before
            assert of_worker
            pipe(x)
            own = threads_now() - of_worker
            assert are_gone(since=own)

    with_two_threads(body)


@pytest.mark.parametrize("threads", [1, 2])
def test_they_stay_where_nobody_needs_their_cores_or_without_the_library(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads > 1:
        monkeypatch.setattr(cores, "_gnu_openmp", lambda: None)

    def body() -> None:
        before = threads_now()
        compute()
        end_idle_threads(threads)
        time.sleep(0.1)
        assert len(threads_now() - before) == 1

    with_two_threads(body)
