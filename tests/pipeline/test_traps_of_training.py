"""Traps that training steps fell into elsewhere: each test is named after its trap."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.schedule import SCHEDULES
from tests.support.models import mlp, uniform_plan, workers_for

X, Y = torch.randn(10, 8), torch.randn(10, 8)
KINDS = pytest.mark.parametrize("workers", ["threads", "processes"])


pytestmark = pytest.mark.usefixtures("pool")


def make(model: nn.Module, p: int = 2, m: int = 4, x: Any = X, **options: Any) -> ps.Pipeline:
    """A pipeline for which nothing is measured."""
    program = ps.capture(model, (x,))
    asked = {k: options.pop(k) for k in ("schedule", "cuts", "recompute") if k in options}
    plan = uniform_plan(program, p, m, **asked)
    return ps.Pipeline(model, (x,), devices=["cpu"] * p, program=program, plan=plan, **options)


def plain_step(
    model: nn.Module, m: int, loss_fn: Callable[..., Any] = F.mse_loss, y: torch.Tensor = Y
) -> torch.Tensor:
    """Gradient accumulation as anybody would write it; the batch's loss."""

    def work() -> torch.Tensor:
        total = torch.zeros(())
        for part, target in zip(X.tensor_split(m), y.tensor_split(m), strict=True):
            loss = loss_fn(model(part), target) * (len(part) / len(X))
            loss.backward()
            total = total + loss.detach()
        return total

    return run_with_threads(work, 1)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """State and gradients, bit for bit."""
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@KINDS
def test_batchnorm_statistics_destroyed_by_shape_inference(workers: str) -> None:
    """Shapes were found by running later stages on uninitialised memory, which ruins statistics."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b", "workers": workers}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, **options, replicas=1) as pipe:
        assert_same(model, twin)  # captured, profiled, planned and sent
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            plain_step(twin, 2)
        assert_same(model, twin)
        assert int(model[1].num_batches_tracked) == 4


class Tied(nn.Module):
    """The first weight is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


@KINDS
def test_tied_weights_that_silently_drift_apart(workers: str) -> None:
    """Each stage trained a copy of its own."""
    model = Tied()
    twin = copy.deepcopy(model)
    with make(model, workers=workers) as pipe:
        ours = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            plain_step(twin, 4)
            ours.step()
            theirs.step()
        assert_same(model, twin)
        assert model.last.weight is model.first.weight
        state = pipe.state_dict()
        assert torch.equal(state["first.weight"], state["last.weight"])


@KINDS
def test_eval_ignored_after_tracing(workers: str) -> None:
    """The traced program went on in training mode: dropout stayed, statistics moved."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    with make(model, workers=workers) as pipe, torch.no_grad():
        assert pipe.training
        assert not torch.equal(pipe(X), pipe(X))
        mean = model[1].running_mean.clone()
        pipe.eval()
        assert not pipe.training
        expected = run_with_threads(lambda: torch.cat([model(x) for x in X.tensor_split(4)]), 1)
        assert torch.equal(pipe(X), expected)
        assert torch.equal(model[1].running_mean, mean)
        assert not pipe.train().eval().training


@KINDS
def test_accumulation_over_several_steps_rescaled_twice(workers: str) -> None:
    """Each step divided all that was in `.grad`, with what earlier steps had left there."""
    model = mlp(8, 8, 8)
    twin = copy.deepcopy(model)
    with make(model, workers=workers) as pipe:
        for _ in range(3):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            plain_step(twin, 4)
        assert_same(model, twin)


@KINDS
def test_stale_losses_replayed_after_an_exception(workers: str) -> None:
    """The losses of a step that had failed were taken for those of the next."""
    model = mlp(8, 8, 8)
    twin = copy.deepcopy(model)

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if (target == target.max()).any() and target.max() > 50:
            raise ArithmeticError("no such target")
        return F.mse_loss(output, target) * 1000

    bad = Y.clone()
    bad[5] = 100.0  # in the second of four micro-batches
    with make(model, workers=workers) as pipe:
        with pytest.raises(ps.WorkerError) as raised:
            pipe.train_step(X, target=bad, loss_fn=fails)
        assert raised.value.microbatch == 1
        assert all(p.grad is None for p in model.parameters())
        loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert torch.equal(loss, plain_step(twin, 4))
        assert_same(model, twin)


@KINDS
def test_mean_of_means_with_ignored_labels(workers: str) -> None:
    """Micro-batches with other numbers of labels counted the same: here 1, 2 and 3."""
    labels = torch.tensor([-100, 1, -100, -100, -100, 2, 3, 4, 5, 6])
    model = mlp(8, 8, 8)
    twin, whole = copy.deepcopy(model), copy.deepcopy(model)
    counted = F.cross_entropy(whole(X), labels, ignore_index=-100)
    counted.backward()
    with make(model, m=3, workers=workers) as pipe:
        loss = pipe.train_step(
            X,
            target=labels,
            loss_fn=lambda o, t: F.cross_entropy(o, t, ignore_index=-100),
            weight=lambda t: (t != -100).sum(),
        )

    def accumulate() -> None:
        for x, y in zip(X.tensor_split(3), labels.tensor_split(3), strict=True):
            share = float((y != -100).sum()) / 6
            (F.cross_entropy(twin(x), y, ignore_index=-100) * share).backward()

    run_with_threads(accumulate, 1)
    assert_same(model, twin)
    assert torch.allclose(
        loss, counted
    )  # the whole batch at once is another sum, so not a bit more
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_fewer_microbatches_than_stages(schedule: str) -> None:
    """Some schedules waited for micro-batches that never came."""
    stages = 4
    workers = workers_for(schedule, stages)
    assert workers is not None
    for m in (1, 2):
        model = mlp(*[8] * 6)
        twin = copy.deepcopy(model)
        with make(model, p=workers, m=m, schedule=schedule) as pipe:
            assert len(pipe.plan.stages) >= 2
            loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            assert torch.equal(loss, plain_step(twin, m))
            assert_same(model, twin)


def test_post_accumulate_hooks_skipped() -> None:
    """`register_post_accumulate_grad_hook` did not fire; it does, once for each micro-batch."""
    model = mlp(8, 8, 8)
    twin = copy.deepcopy(model)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    with make(model) as pipe:
        for name, found in ((model, seen[0]), (twin, seen[1])):
            for parameter in name.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, found=found: found.append(p.grad.clone())
                )
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        plain_step(twin, 4)
    sums = [sorted(float(g.double().sum()) for g in found) for found in seen]
    assert len(sums[0]) == 4 * 4
    assert sums[0] == sums[1]


CALLS: Counter[int] = Counter()


class Counted(nn.Linear):
    """Counts its forwards, where nobody puts that back: a module's own attributes are."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[id(self)] += 1
        return super().forward(x) + self.more


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_recomputed_once_for_each_parameter_group(schedule: str) -> None:
    """Each micro-batch is recomputed once, whatever parameters and halves there are."""
    model = nn.Sequential(Counted(), nn.Tanh(), Counted(), nn.Tanh())
    with make(model, schedule=schedule, recompute="all", audit=None) as pipe:
        assert all(stage.recompute for stage in pipe.plan.stages)
        CALLS.clear()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert [CALLS[id(model[0])], CALLS[id(model[2])]] == [2 * 4, 2 * 4]
