"""A custom `autograd.Function` is a call as that of any other function."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan
from tests.zoo.check import check
from tests.zoo.entry import Entry

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Double(torch.autograd.Function):
    """Its gradient is not that of what it computes, so that nobody can do without its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.sign() * 5, None


class Product(torch.autograd.Function):
    """Two results, of a weight as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return x @ weight, x.sum(1)

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return one @ weight.T + other[:, None], 3 * (x.T @ one)


class Noisy(torch.autograd.Function):
    """Draws random numbers in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 4


class Nested(torch.autograd.Function):
    """Applies another one, and looks at values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            found: torch.Tensor = Double.apply(x.detach().requires_grad_(), 2.0)
        return found.detach() if x.sum() > 0 else -found.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Hidden(torch.autograd.Function):
    """Uses what it is not given."""

    weights: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ Hidden.weights.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class Block(nn.Module):
    """Layers with a function between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.weight = nn.Parameter(torch.eye(4) * 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        match self.how:
            case "constant":
                x = Double.apply(x, 2.0)
            case "weight":
                one, other = Product.apply(x, self.weight)
                x = one * other[:, None]
            case "random":
                x = Noisy.apply(x)
            case "in place":
                x = InPlace.apply(x * 1)
            case "nested":
                x = Nested.apply(x)
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = Product.apply(x @ self.weight, self.weight.bfloat16())[0].float()
            case "local":

                class Local(Double):
                    pass

                x = Local.apply(x, 2.0)
            case "hidden":
                Hidden.weights.append(self.weight)
                x = Hidden.apply(x)
        result: torch.Tensor = self.after(x).relu()
        return result


OPENED = ("constant", "weight", "random", "in place", "nested", "autocast")


def build(how: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(how), nn.Linear(4, 4), Block(how))


@pytest.mark.parametrize("how", OPENED)
def test_it_is_opened_and_exact(how: str) -> None:
    def inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
        return (torch.randn(rows, 4),), {}

    program = ps.capture(build(how), (X,))
    assert not program.closed
    assert sum(call.label.endswith(".apply()") for call in program.train.calls) == 2
    result = check(Entry(how, "plain", lambda: build(how), inputs))
    assert result.status == "exact", result


def test_it_runs_in_worker_processes() -> None:
    model, twin = build("weight"), build("weight")
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 3)
    with ps.Pipeline(
        model, plan=plan, program=program, devices=["cpu"] * 2, workers="processes"
    ) as pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        for part in range(3):
            rows = slice(2 * part, 2 * part + 2)
            (F.mse_loss(twin(X[rows]), X[rows]) / 3).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("local", "applies Local, an autograd.Function of its own, which may be another one"),
        ("hidden", "applies Hidden, an autograd.Function of its own, which uses 0.weight"),
    ],
)
def test_what_cannot_be_repeated_stays_closed_and_right(how: str, why: str) -> None:
    model = build(how)
    program = ps.capture(model, (X,))
    assert set(program.closed) == {"0", "2"}
    assert re.search(why, program.closed["0"])
    assert torch.equal(program(X), model(X))
