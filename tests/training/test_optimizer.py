"""The optimizer that steps on the workers is the plain one, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import Optimizer

import penstock as ps
from tests.support.models import mlp

X, Y = torch.randn(9, 6), torch.randn(9, 6)


@pytest.fixture
def pipe() -> Iterator[ps.Pipeline]:
    model = mlp(6, 6, 6, 6)
    with ps.Pipeline(model, (X,), devices=["cpu"] * 3, num_microbatches=2, replicas=1) as found:
        yield found


def train(pipe: ps.Pipeline, ours: Optimizer, twin: Any, theirs: Optimizer, steps: int) -> None:
    """Both optimizers get the same gradients, so only their steps are compared."""
    for _ in range(steps):
        ours.zero_grad()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        for a, b in zip(pipe.parameters(), twin.parameters(), strict=True):
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    for a, b in zip(pipe.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
    ],
)
def test_equal_to_the_plain_one(
    pipe: ps.Pipeline, kind: type[Optimizer], options: dict[str, Any]
) -> None:
    twin = copy.deepcopy(pipe.model)
    train(pipe, pipe.optimizer(kind, **options), twin, kind(twin.parameters(), **options), 3)


class Tempered(torch.optim.AdamW):
    """Has a setting that older state dicts do not have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.usual = 0.5

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("temper", self.usual)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Tempered])
def test_the_state_of_an_older_version(
    pipe: ps.Pipeline, kind: type[Optimizer], masters: bool
) -> None:
    """Counts of steps were numbers, and settings were missing."""
    ours = pipe.optimizer(kind, lr=0.01, master_weights=masters)
    pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    ours.step()
    old = copy.deepcopy(ours.state_dict())
    for state in old["state"].values():
        state["step"] = int(state["step"])
    for group in old["param_groups"]:
        del group["maximize"]
    ours.load_state_dict(old)
    assert all(isinstance(state["step"], torch.Tensor) for state in ours.state.values())
    (group,) = ours.param_groups
    assert group["maximize"] is False
    assert group.get("temper") == (0.5 if kind is Tempered else None)
    ours.step()
    assert {int(state["step"]) for state in ours.state.values()} == {2}


def test_groups_and_a_scheduler(pipe: ps.Pipeline) -> None:
    twin = copy.deepcopy(pipe.model)

    def groups(model: Any) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if n == "0.bias"], "lr": 0.5},
        ]

    ours = pipe.optimizer(torch.optim.AdamW, groups(pipe.model), lr=0.1)
    theirs = torch.optim.AdamW(groups(twin), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
    for _ in range(3):
        train(pipe, ours, twin, theirs, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert [g["lr"] for g in ours.param_groups] == [0.0125, 0.0625]
    for optimizer, model in ((ours, pipe.model), (theirs, twin)):
        optimizer.add_param_group({"params": [model[2].bias]})
    train(pipe, ours, twin, theirs, 2)


def test_state_goes_both_ways(pipe: ps.Pipeline) -> None:
    twin = copy.deepcopy(pipe.model)
    ours = pipe.optimizer(torch.optim.Adam, lr=0.1)
    train(pipe, ours, twin, torch.optim.Adam(twin.parameters(), lr=0.1), 2)
    theirs = torch.optim.Adam(twin.parameters(), lr=7.0)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert theirs.param_groups[0]["lr"] == 0.1
    train(pipe, ours, twin, theirs, 2)
    again = pipe.optimizer(torch.optim.Adam, lr=7.0)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(pipe, again, twin, theirs, 2)


def test_a_closure_is_called(pipe: ps.Pipeline) -> None:
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    before = pipe.model[0].weight.clone()
    loss = optimizer.step(lambda: pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
    assert loss.ndim == 0
    assert not torch.equal(before, pipe.model[0].weight)


def test_lbfgs_is_refused(pipe: ps.Pipeline) -> None:
    with pytest.raises(ps.InputError, match="LBFGS evaluates the model several times"):
        pipe.optimizer(torch.optim.LBFGS)
