"""Master weights: the bits of a plain optimizer on float32 copies, wherever the weights are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import penstock as ps
from tests.support.precision import X16, Y16, halved, pipe_of

CPUS = ["cpu"] * 2


class Plain:
    """What somebody would write for one device."""

    def __init__(self, model: nn.Module, kind: type[Optimizer], **options: Any) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = kind(self.masters, **options)

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor | None]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


def train(pipe: ps.Pipeline, ours: Optimizer, theirs: Plain, steps: int) -> None:
    for _ in range(steps):
        ours.zero_grad()
        pipe.train_step(X16, target=Y16, loss_fn=F.mse_loss)
        gradients = [p.grad for p in pipe.parameters()]
        ours.step()
        theirs.step(gradients)
        for a, b in zip(pipe.parameters(), theirs.weights, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 1e-4}),
        (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
        (torch.optim.Adagrad, {"lr": 1e-3, "initial_accumulator_value": 0.1}),
        (torch.optim.SGD, {"lr": 1e-3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_to_a_plain_one(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = halved().to(dtype)
    twin = copy.deepcopy(model)
    model[2].bias.requires_grad_(False)
    with pipe_of(model, devices=CPUS) as pipe:
        ours = pipe.optimizer(kind, master_weights=True, **options)
        theirs, losses = Plain(twin, kind, **options), []
        x, y = X16.to(dtype), Y16.to(dtype)
        for step in range(5):
            if step == 3:
                model[2].bias.requires_grad_(True)  # its copy is made now
            ours.zero_grad()
            losses.append(pipe.train_step(x, target=y, loss_fn=F.mse_loss))
            gradients = [p.grad for p in pipe.parameters()]
            ours.step()
            theirs.step(gradients)
            for a, b in zip(pipe.parameters(), twin.parameters(), strict=True):
                assert torch.equal(a, b)
        assert len(ours.state_dict()["state"]) == 6
        mine = [ours.state[p]["master"] for p in pipe.parameters()]
        for found, expected in zip(mine, theirs.masters, strict=True):
            assert torch.equal(found, expected)
            assert not torch.equal(found, found.to(dtype).float())  # there is more in it


def test_settings_follow_and_groups_are_added() -> None:
    model = halved()
    twin = copy.deepcopy(model)
    with pipe_of(model, devices=CPUS) as pipe:
        groups = [{"params": list(model[:3].parameters()), "weight_decay": 0.5}]
        ours = pipe.optimizer(torch.optim.AdamW, groups, master_weights=True, lr=1e-2)
        theirs = Plain(twin, torch.optim.AdamW, lr=1e-2)
        theirs.optimizer.param_groups[0].update(params=theirs.masters[:4], weight_decay=0.5)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs.optimizer)]
        train(pipe, ours, theirs, 2)
        for scheduler in schedulers:
            scheduler.step()
        train(pipe, ours, theirs, 1)
        ours.add_param_group({"params": list(model[4].parameters())})
        theirs.optimizer.add_param_group({"params": theirs.masters[4:]})
        train(pipe, ours, theirs, 2)


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    model = halved()
    twin = copy.deepcopy(model)
    kind = torch.optim.AdamW
    with pipe_of(model, devices=CPUS) as pipe:
        ours, theirs = (
            pipe.optimizer(kind, master_weights=True, lr=1e-4),
            Plain(twin, kind, lr=1e-4),
        )
        train(pipe, ours, theirs, 3)
        saved = copy.deepcopy((pipe.state_dict(), ours.state_dict()))
    other = halved()
    with pipe_of(other, "zero-bubble", devices=CPUS) as pipe:
        pipe.load_state_dict(saved[0])
        again = pipe.optimizer(kind, master_weights=True, lr=9.0)
        again.load_state_dict(saved[1])
        train(pipe, again, theirs, 2)


def test_weights_that_somebody_else_changed_are_where_it_goes_on() -> None:
    model = halved()
    with pipe_of(model, devices=CPUS) as pipe:
        ours = pipe.optimizer(torch.optim.SGD, master_weights=True, lr=1e-4)
        theirs = Plain(copy.deepcopy(model), torch.optim.SGD, lr=1e-4)
        train(pipe, ours, theirs, 2)
        with torch.no_grad():
            for weight in (model[0].weight, theirs.weights[0]):
                weight[0].mul_(2)
            theirs.masters[0][0].copy_(theirs.weights[0][0])
        train(pipe, ours, theirs, 2)


def test_without_them_small_updates_are_lost() -> None:
    """What they are there for."""
    moved = []
    for masters in (False, True):
        model = halved()
        before = model[0].weight.detach().clone()
        with pipe_of(model, devices=CPUS) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, master_weights=masters, lr=1e-5)
            for _ in range(60):
                pipe.zero_grad()
                pipe.train_step(X16, target=Y16, loss_fn=F.mse_loss)
                optimizer.step()
        moved.append(int((model[0].weight != before).sum()))
    assert moved[0] < moved[1]


def test_what_is_wrong_is_said() -> None:
    with pipe_of(halved().half(), devices=CPUS) as pipe:
        with pytest.raises(ps.InputError, match="LBFGS evaluates the model several times"):
            pipe.optimizer(torch.optim.LBFGS, master_weights=True)
        with pytest.raises(ps.InputError, match="given no parameters"):
            pipe.optimizer(torch.optim.AdamW, [], master_weights=True)
        optimizer, scaler = pipe.optimizer(torch.optim.SGD, master_weights=True), pipe.scaler()
        pipe.train_step(X16.half(), target=Y16.half(), loss_fn=F.mse_loss, scaler=scaler)
        with pytest.raises(ps.InputError, match="gradients in float16 cannot be unscaled"):
            scaler.step(optimizer)
