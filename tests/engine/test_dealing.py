"""Replicas in threads take micro-batches one by one: a slow one takes fewer, and the bits stay."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.engine.dealing import Dealer, is_one_by_one
from penstock.schedule import build

X, Y = torch.randn(32, 6), torch.randn(32, 4)
COUNT = 16


class Slow(nn.Module):
    """Takes longer in one of the threads."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RAN.append(threading.current_thread().name)
        if threading.current_thread().name == self.slow:
            time.sleep(0.05)
        return x


RAN: list[str] = []  # the threads that have run a micro-batch


def build_model(slow: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), Slow(slow), nn.Linear(8, 4))


def made(model: nn.Module, replicas: int, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(
        *(model, (X,)),
        devices=["cpu"] * replicas,
        replicas=replicas,
        num_microbatches=COUNT,
        keep_closed=["3"],
        progress=None,
        **options,
    )


@pytest.mark.parametrize("slow", ["penstock-0", "penstock-1"])
def test_a_slow_thread_takes_fewer_micro_batches(slow: str) -> None:
    with made(build_model(slow), 2, audit=None) as pipe, torch.no_grad():
        pipe.eval()
        pipe(X)
        RAN.clear()
        pipe(X)
        ran = Counter(RAN)
    assert ran.total() == COUNT
    assert ran[slow] < COUNT / 2


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_bits_are_those_of_one_device(replicas: int) -> None:
    model, plain = build_model("penstock-0"), build_model("")
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    losses, expected = [], []

    def loop() -> None:
        parts = [
            F.mse_loss(plain(x), y) / COUNT for x, y in zip(X.split(2), Y.split(2), strict=True)
        ]
        for part in parts:
            part.backward()
        expected.append(sum(parts[1:], parts[0]).detach())

    with made(model, replicas) as pipe:
        for _ in range(3):
            losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            optimizer.step()
            optimizer.zero_grad()
            run_with_threads(loop, 1)
            other.step()
            other.zero_grad()
        assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
        pipe.eval()
        out = pipe(X)
    assert torch.equal(out, torch.cat([plain.eval()(x) for x in X.split(2)]))
    assert list(map(torch.equal, losses, expected)) == [True] * 3


class Fails(Slow):
    """Fails in one of the threads; the other one takes its time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == self.slow:
            raise LookupError("on purpose")
        self.count += 1
        time.sleep(0.1)
        return x


def test_nobody_takes_more_when_one_has_failed() -> None:
    model = build_model("penstock-0")
    model[3] = failing = Fails("")
    failing.count = 0
    with made(model, 2, audit=None, timeout=60.0) as pipe:
        failing.slow, failing.count = "penstock-0", 0
        with pytest.raises(ps.WorkerError, match="on purpose"), torch.no_grad():
            pipe(X)
        assert failing.count < COUNT - 1
        failing.slow = ""
        pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)


def test_every_number_is_taken_once_in_ascending_order() -> None:
    dealer = Dealer(1000)
    taken: list[list[int]] = [[], []]
    threads = [threading.Thread(target=own.extend, args=(dealer,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken[0] + taken[1]) == list(range(1000))
    assert all(own == sorted(own) for own in taken)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", True), ("gpipe", False)])
def test_which_schedules_are_done_with_one_before_the_next(schedule: str, expected: bool) -> None:
    assert is_one_by_one(build(schedule, 1, 4).workers[0]) is expected
