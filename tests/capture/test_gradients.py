"""A replay has the gradients and the buffers of the model itself, whatever its Python does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.capture import Key
from penstock.capture.trees import flatten
from tests.support.models import Case, cases, own_forward

KEY = Key(3, 2, 1)
X = torch.randn(6, 4)


class StraightThrough(torch.autograd.Function):
    """Rounds, and pretends that it did not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Glue(nn.Module):
    """Two linear layers and a function of them."""

    def __init__(self, forward: Callable[[Glue, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.how = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def without_gradient(m: Glue, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = m.b(x).sigmoid()
    return m.a(x) * gate


def in_place(m: Glue, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).clone()
    y[:, 0] = 1.0
    y[:, 1:3] += m.b(x)[:, 1:3]
    return y


GLUE: dict[str, Callable[[Glue, torch.Tensor], torch.Tensor]] = {
    "straight-through": lambda m, x: StraightThrough.apply(m.a(x)),
    "reentrant checkpoint": lambda m, x: checkpoint(m.a, x, use_reentrant=True),
    "checkpoint": lambda m, x: checkpoint(lambda y: F.gelu(m.a(y)), x, use_reentrant=False),
    "no_grad": without_gradient,
    "in place": in_place,
    "a parameter": lambda m, x: torch.einsum("bi,oi->bo", x, m.a.weight) * m.b.bias,
    "detach": lambda m, x: m.a(x).detach() + m.b(x),
    "random": lambda m, x: m.a(x) + torch.randn(x.shape) + torch.rand_like(x),
    "spectral norm": lambda m, x: m.spectral(x),
    "rows by index": lambda m, x: m.a(x)[x[:, 0].argsort()],
    "one by one": lambda m, x: torch.stack([m.a(row) for row in x]),
}


def gradients(model: nn.Module, result: Any) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    leaves = [t for t in flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    sum(t.square().sum() for t in leaves).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    program = ps.capture(model, args, kwargs)
    twin = copy.deepcopy(model)
    theirs = gradients(twin, own_forward(program, args, kwargs, KEY, twin))
    ours = gradients(model, program.replay(args, kwargs, KEY))
    assert any(gradient is not None for gradient in theirs.values())
    for name, expected in theirs.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        assert found is None or torch.equal(found, expected), name
    for (name, found), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", GLUE)
def test_glue(name: str) -> None:
    check(nn.Sequential(nn.Linear(4, 4), Glue(GLUE[name]), nn.Linear(4, 2)), (X,), {})


@pytest.mark.parametrize("case", [c for c in cases().values() if c.name != "resnet50"], ids=str)
def test_models(case: Case) -> None:
    check(case.model(), case.args, case.kwargs)
