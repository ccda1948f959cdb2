"""A view made under `no_grad` says that it requires gradients, and passes none on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        with torch.no_grad():
            view = x[:, :]
        result: torch.Tensor = self.after(x * 2 + view)
        return result


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_it_can_cross_a_cut(cut: int) -> None:
    torch.manual_seed(1)
    model = Viewing()
    twin = copy.deepcopy(model)
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 3, "1f1b", [cut])
    with ps.Pipeline(model, plan=plan, program=program, devices=["cpu"] * 2) as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
    for part in X.split(2):
        (F.mse_loss(twin(part), part) / 3).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
