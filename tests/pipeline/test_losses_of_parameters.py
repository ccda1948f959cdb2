"""A loss that uses the model's own parameters has the bits of one device, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from tests.support.models import uniform_plan

X, Y = torch.randn(9, 6), torch.randn(9, 6)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


pytestmark = pytest.mark.usefixtures("pool")


def build() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


OUTSIDE = build()  # a worker that imports this module has another one


def make(model: nn.Module, workers: str = "threads", **asked: Any) -> ps.Pipeline:
    program = ps.capture(model, (X,))
    options: dict[str, Any] = {"program": program, "plan": uniform_plan(program, 2, 4, **asked)}
    return ps.Pipeline(model, (X,), devices=["cpu", "cpu"], workers=workers, **options, replicas=1)


def penalised(weight: nn.Parameter) -> Loss:
    return lambda output, target: F.mse_loss(output, target) + 0.3 * weight.square().sum()


def plain(model: nn.Module, loss_fn: Loss) -> list[torch.Tensor]:
    def loop() -> None:
        for x, y in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
            (loss_fn(model(x), y) * (len(x) / len(X))).backward()

    run_with_threads(loop, 1)
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_parameters_of_the_last_stage() -> None:
    """They are in the graph that the loss is in, so there is one sum, as on one device."""
    model = build()
    twin = copy.deepcopy(model)
    expected = plain(twin, penalised(twin[6].weight))
    with make(model) as pipe:
        pipe.train_step(X, target=Y, loss_fn=penalised(model[6].weight))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_parameters_of_the_loss_alone() -> None:
    """Which the model does not have: no other graph adds to their gradients."""
    model, scale = build(), nn.Parameter(torch.ones(()))
    twin, other = copy.deepcopy(model), nn.Parameter(torch.ones(()))
    expected = plain(twin, lambda output, target: F.mse_loss(output, target) * other)
    with make(model) as pipe:
        pipe.train_step(X, target=Y, loss_fn=lambda o, t: F.mse_loss(o, t) * scale)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert scale.grad is not None
    assert other.grad is not None
    assert torch.equal(scale.grad, other.grad)


APART: dict[str, dict[str, Any]] = {
    "an earlier stage": {"schedule": "1f1b"},
    "a recomputed one": {"schedule": "1f1b", "recompute": "all"},
    "a halved one": {"schedule": "zero-bubble"},
}


@pytest.mark.parametrize("where", list(APART))
def test_parameters_of_other_graphs_are_refused(where: str) -> None:
    """Before anything is left in `.grad`; without gradients they may be used."""
    model = build()
    number = 0 if where == "an earlier stage" else 6
    loss_fn = penalised(model[number].weight)
    with make(model, **APART[where]) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(ps.InputError, match=rf"'{number}.weight', whose gradient is"):
            pipe.train_step(X, target=Y, loss_fn=loss_fn)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
        with torch.no_grad():
            loss = pipe.train_step(X, target=Y, loss_fn=loss_fn)
        assert torch.isfinite(loss)
        model[number].weight.requires_grad_(False)
        pipe.train_step(X, target=Y, loss_fn=loss_fn)


def of_a_module(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Not sent to a worker, but imported there, with a model that is not the script's."""
    return F.mse_loss(output, target) + OUTSIDE[0].weight.square().sum()


def test_parameters_that_a_worker_imports_are_refused() -> None:
    with make(OUTSIDE, "processes") as pipe:
        with pytest.raises(ps.InputError, match=r"uses a parameter of shape \(6, 6\)"):
            pipe.train_step(X, target=Y, loss_fn=of_a_module)
        assert all(p.grad is None for p in OUTSIDE.parameters())
