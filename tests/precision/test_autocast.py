"""Under autocast a pipeline gives the bits of one device under the same autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.verification import Reference, run_with_threads
from tests.models import cases, uniform_plan
from tests.pool import pooled
from tests.precision.steps import X, Y, gradients, island, pipe_of

DTYPES = [torch.bfloat16, torch.float16]
CPUS = ["cpu"] * 2


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "none"), ("zero-bubble", "none"), ("interleaved", "none"), ("zero-bubble", "all")],
)
def test_a_step_is_that_of_one_device(dtype: torch.dtype, schedule: str, recompute: str) -> None:
    model = island()
    with pipe_of(model, schedule, recompute, devices=CPUS) as pipe:
        twin = copy.deepcopy(model)
        reference = Reference(twin, pipe.program, 3, (X,), {})
        for step in range(2):
            with torch.autocast("cpu", dtype):
                loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                alone = run_with_threads(lambda s=step: reference.train_step(s, F.mse_loss, Y), 1)
            assert torch.equal(loss, alone)
            assert_same(model, twin)


@pytest.mark.parametrize(
    ("name", "workers"), [("named", "processes"), ("unet", "threads"), ("gpt2", "threads")]
)
def test_verify_under_autocast(name: str, workers: Any) -> None:
    case = cases()[name]
    with pooled(), torch.autocast("cpu", torch.bfloat16):
        plan = uniform_plan(ps.capture(case.model(), case.args, case.kwargs), 2, 3)
        report = ps.verify(
            *(case.model(), case.args, case.kwargs),
            target=case.target,
            loss_fn=case.loss_fn,
            devices=CPUS,
            plan=plan,
            workers=workers,
        )
    assert report.ok, str(report)


@pytest.mark.parametrize("inside", [False, True])
def test_the_backward_is_where_it_is_called(inside: bool) -> None:
    """Under autocast, which casts what it multiplies, or not."""
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    x, y = X[:3], Y[:3]

    def step(forward: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(forward(x), y)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    with pipe_of(model, microbatches=1, devices=CPUS) as pipe:
        step(pipe)
    run_with_threads(lambda: step(twin), 1)
    assert_same(model, twin)


def test_train_steps_backward_is_outside() -> None:
    """As PyTorch wants it, and as if it were written so."""
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    with pipe_of(model, devices=CPUS) as pipe, torch.autocast("cpu", torch.bfloat16):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

    def alone() -> None:
        for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(twin(x), y) * (len(x) / len(X))
            loss.backward()

    run_with_threads(alone, 1)
    assert_same(model, twin)


def test_the_cache_of_weights_is_followed() -> None:
    """A weight that is used twice gets its gradient in another precision without."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[3] = model[1]
    found = []
    for cached in (True, False):
        ours, twin = copy.deepcopy(model), copy.deepcopy(model)
        region = torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)
        with pipe_of(ours, cuts=[1], devices=CPUS) as pipe, region:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            reference = Reference(twin, pipe.program, 3, (X,), {})
            run_with_threads(lambda r=reference: r.train_step(0, F.mse_loss, Y), 1)
        assert_same(ours, twin)
        found.append(gradients(pipe)["1.weight"])
    assert not torch.equal(*found)
