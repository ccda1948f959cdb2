"""Two pipelines of one model: in turns they are one, and at the same time they are told so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan

X, Y = torch.randn(8, 6), torch.randn(8, 6)

pytestmark = pytest.mark.usefixtures("pool")


def model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(4)
    middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 6), nn.Tanh())


def make(net: nn.Module, workers: str = "threads", audit: int | None = 1) -> ps.Pipeline:
    program = ps.capture(net, (X,))
    plan = uniform_plan(program, 2, 4)
    devices = ["cpu", "cpu"]
    return ps.Pipeline(
        net, (X,), devices=devices, program=program, plan=plan, workers=workers, audit=audit
    )


def step(pipe: ps.Pipeline) -> None:
    pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


class Waiting:
    """A loss whose second backward waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.backwards = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(_Wait.apply(output, self), target)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: Waiting) -> torch.Tensor:
        ctx.loss = loss
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.loss.backwards += 1
        if ctx.loss.backwards == 2:
            ctx.loss.begun.set()
            ctx.loss.go.wait(60)
        return gradient, None


@contextmanager
def training(pipe: ps.Pipeline) -> Iterator[Future[torch.Tensor]]:
    """While open, a step of this pipeline is under way in another thread."""
    loss = Waiting()
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(pipe.train_step, X, target=Y, loss_fn=loss)
        try:
            assert loss.begun.wait(60)
            yield under_way
        finally:
            loss.go.set()
            under_way.result()


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_in_turns_with_an_optimizer_each(workers: str) -> None:
    net = model(norm=True)
    twin = copy.deepcopy(net)
    with make(net) as one, make(net, workers) as other, make(twin) as only:
        pipes = one, other
        optimizers = (
            one.optimizer(torch.optim.Adam, lr=0.01),
            other.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
        )
        expected = (
            torch.optim.Adam(twin.parameters(), lr=0.01),
            torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9),
        )
        for k in (0, 1, 1, 0, 1, 0):
            net.zero_grad()
            step(pipes[k])
            step(pipes[1 - k])
            optimizers[k].step()
            twin.zero_grad()
            step(only)
            step(only)
            expected[k].step()
    for found, right in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, right)
        assert torch.equal(found.grad, right.grad)
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_both_train_at_the_same_time() -> None:
    net = model()
    with make(net) as one, make(net) as other:
        step(one)
        expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        with training(one):
            with pytest.raises(ps.InputError, match=r"both add to the gradients.*a lock"):
                step(other)
            with pytest.raises(ps.InputError, match="another pipeline"):
                other(X)  # its backward would
        assert all(p.grad is not None for p in net.parameters())
        assert all(map(torch.equal, (p.grad for p in net.parameters()), expected))
        net.zero_grad()
        step(other)
        assert all(map(torch.equal, (p.grad for p in net.parameters()), expected))


def test_a_part_of_the_model() -> None:
    net = model()
    with make(net) as one, make(nn.Sequential(net[0], nn.Tanh())) as part:
        with training(one), pytest.raises(ps.InputError, match="or of a part of it"):
            step(part)
        step(part)


def test_one_infers_while_the_other_trains() -> None:
    net = model()
    with make(net) as one, make(net, audit=1) as other, torch.no_grad():
        expected = other(X)
        with torch.enable_grad():
            step(one)
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        with torch.enable_grad(), training(one), torch.no_grad():
            assert torch.equal(other(X), expected)
        assert all(map(torch.equal, (p.grad for p in net.parameters()), gradients))


SEEN: list[bool] = []
"""Whether there was a gradient, forward by forward."""


class Spy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.weight.grad is not None)
        return x * self.weight


def test_audits_of_evaluation_leave_gradients_to_whoever_trains() -> None:
    with make(nn.Sequential(nn.Linear(6, 6), Spy())) as pipe, torch.no_grad():
        with torch.enable_grad():
            step(pipe)
        SEEN.clear()
        pipe(X)
        assert pipe.audit.microbatches == 2
        assert len(SEEN) == 6
        assert all(SEEN)


def test_one_changes_what_the_other_reads() -> None:
    net = model(norm=True)
    with make(net) as one, make(net) as other, torch.no_grad():
        results = one.eval().map([X] * 3, ahead=3)
        expected = one(X)
        assert torch.equal(next(results), expected)
        assert torch.equal(other(X), expected)  # both only read
        before = [buffer.clone() for buffer in net.buffers()]
        with torch.enable_grad(), pytest.raises(ps.InputError, match=r"buffers.*take all results"):
            step(other.train())
        assert all(map(torch.equal, net.buffers(), before))
        other.eval()
        assert all(torch.equal(result, expected) for result in results)
        with torch.enable_grad():
            step(other.train())


def test_a_closed_one_is_in_nobodys_way() -> None:
    net = model(norm=True)
    one = make(net)
    results = one.eval().map([X] * 3, ahead=3)
    next(results)
    one.close()
    with make(net.train()) as other:
        step(other)
    assert net(X).shape == (8, 6)
    results.close()


def test_weights_that_left_the_workers_memory_are_not_saved(tmp_path: Path) -> None:
    net = model()
    with make(net, "processes") as pipe:
        pipe.save(tmp_path)
        first = net[0].weight
        first.data = torch.zeros(6, 6)
        with pytest.raises(ps.InputError, match="build a new pipeline"):
            pipe.save(tmp_path)
        assert ps.load(tmp_path)


def test_a_backward_that_was_refused_can_be_called_again() -> None:
    net = model(norm=True)
    with make(net) as one, make(net) as other:
        loss = one(X).sum()
        with training(other), pytest.raises(ps.InputError, match="has passes under way"):
            loss.backward()
        loss.backward()
        assert all(p.grad is not None for p in net.parameters())
