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


def number() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def falls_to(count: int) -> bool:
    """Whether there are so many threads before long: they end by themselves."""
    deadline = time.monotonic() + 10
    while number() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return number() == count


def compute() -> torch.Tensor:
    """An operation that is divided among all threads of the one that calls it."""
    return torch.ones(2_000_000).exp()


def with_two_threads(body: Callable[[], None]) -> None:
    """Run this in a thread whose operations are divided in two."""
    run_with_threads(body, 2)


def test_they_end_and_come_back_with_the_next_operation() -> None:
    def body() -> None:
        before = number()
        expected = compute()
        assert number() == before + 1
        end_idle_threads(2)
        assert falls_to(before)
        end_idle_threads(2)
        assert torch.equal(compute(), expected)
        assert number() == before + 1

    with_two_threads(body)


def test_a_pass_ends_those_of_the_script() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        with ps.Pipeline(model, (X,), devices=["cpu"], audit=None) as pipe:
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            before = number()
            compute()
            assert number() == before + 1
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            assert falls_to(before)

    with_two_threads(body)


@pytest.mark.parametrize("threads", [1, 2])
def test_they_stay_where_nobody_needs_their_cores_or_without_the_library(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads > 1:
        monkeypatch.setattr(cores, "_gnu_openmp", lambda: None)

    def body() -> None:
        before = number()
        compute()
        end_idle_threads(threads)
        time.sleep(0.1)
        assert number() == before + 1

    with_two_threads(body)
