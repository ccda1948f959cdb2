"""A replica that is early keeps the gradients of one micro-batch, whatever the others do."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.engine.sums import OrderedSum
from tests.support.models import replicated, uniform_plan
from tests.support.training import assert_same

COUNT = 8
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(5))


class Slow(nn.Module):
    """A layer whose backward takes its time on one worker, or fails there once.

    Args:
        worker: which one.
    """

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.linear, self.worker, self.fails = nn.Linear(6, 6), worker, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x)
        if result.requires_grad:
            result.register_hook(self.late)
        return result  # type: ignore[no-any-return]

    def late(self, gradient: torch.Tensor) -> None:
        if threading.current_thread().name == f"penstock-{self.worker}":
            time.sleep(5e-3)
            if self.fails:
                raise ArithmeticError("no gradient")


def made(replicas: int, stages: int, schedule: str, slow: int) -> ps.Pipeline:
    torch.manual_seed(0)
    layers = (m for _ in range(2) for m in (Slow(slow), nn.BatchNorm1d(6), nn.Linear(6, 6)))
    model = nn.Sequential(*layers)
    program = ps.capture(model, (X,), keep_closed=("0", "3"))
    plan = replicated(uniform_plan(program, stages, COUNT, schedule), replicas)
    return ps.Pipeline(
        *(model, (X,)),
        program=program,
        plan=plan,
        devices=plan.devices,
        threads_per_worker=1,
        audit=None,
        timeout=30.0,
    )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many micro-batches a replica has gradients that wait, after every backward."""
    found: list[int] = []
    add = OrderedSum.add

    def noting(self: OrderedSum, *args: Any) -> None:
        add(self, *args)
        found.append(len(self._early))

    monkeypatch.setattr(OrderedSum, "add", noting)
    return found


def plainly(pipe: ps.Pipeline) -> torch.Tensor:
    loss = F.mse_loss(pipe(X), X)
    loss.backward()
    return loss.detach()


def stepped(pipe: ps.Pipeline, is_plain: bool = False) -> list[Any]:
    loss = plainly(pipe) if is_plain else pipe.train_step(X, target=X, loss_fn=F.mse_loss)
    return [loss, *(parameter.grad for parameter in pipe.model.parameters())]


@pytest.mark.parametrize(
    ("replicas", "stages", "schedule", "is_plain"),
    [
        *((2, 1, "gpipe", is_plain) for is_plain in (False, True)),
        (2, 1, "1f1b", False),
        *((2, 2, schedule, False) for schedule in ("gpipe", "eager-1f1b", "breadth-first")),
        (3, 2, "interleaved", False),  # the last one runs fewer than the others
    ],
)
@pytest.mark.parametrize("slow", ["first", "last"])
def test_no_replica_keeps_more_than_one(
    replicas: int, stages: int, schedule: str, is_plain: bool, slow: str, kept: list[int]
) -> None:
    worker = 0 if slow == "first" else (replicas - 1) * stages
    found = []
    with made(replicas, stages, schedule, worker) as pipe:
        while len(found) < 20 and 1 not in kept:  # who is dealt micro-batches may be alone in some
            found.append(stepped(pipe, is_plain))
            pipe.model.zero_grad()
    assert max(kept) == 1
    with made(1, stages, schedule, -1) as pipe:
        for step in found:
            assert_same(step, stepped(pipe, is_plain))
            pipe.model.zero_grad()


def test_who_waits_for_one_that_fails_is_given_up(kept: list[int]) -> None:
    with made(2, 1, "gpipe", 0) as pipe:
        layer = pipe.model[0]
        layer.fails = True
        with pytest.raises(ps.WorkerError, match="no gradient"):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        assert all(parameter.grad is None for parameter in pipe.model.parameters())
        layer.fails = False
        again = stepped(pipe)
    with made(1, 1, "gpipe", -1) as pipe:
        assert_same(again, stepped(pipe))
