"""Closed modules that are lent parameters for a call, and hooks on nodes of autograd's graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import penstock as ps

X, Y = torch.randn(8, 6), torch.randn(8, 4)


class Scaled(nn.Module):
    """Calls a layer with weights that it has made, which are equal to the layer's at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4) if how != "nested" else nn.Sequential(nn.Linear(6, 4))
        self.g = nn.Parameter(torch.ones(4, 1))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "functional_call":
            return functional_call(self.net, {"weight": self.net.weight * self.g}, (x,))
        if self.how == "nested":
            return functional_call(self.net, {"0.weight": self.net[0].weight * self.g}, (x,))
        own = self.net.weight
        self.net._parameters["weight"] = own * self.g  # type: ignore[assignment]
        result = self.net(x)
        self.net._parameters["weight"] = own
        return result


@pytest.mark.parametrize("how", ["functional_call", "nested", "by hand"])
def test_parameters_that_are_lent_get_their_gradients(how: str) -> None:
    assert_closed_and_same(Scaled(how), "puts another tensor in the place of 1.net")


class Hooked(nn.Module):
    """Halves a gradient, by a hook on the node that it comes from."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if h.grad_fn is not None:
            if self.how == "prehook":
                h.grad_fn.register_prehook(lambda gradients: tuple(g / 2 for g in gradients))
            elif self.how == "hook":
                h.grad_fn.register_hook(lambda into, out: tuple(_half(g) for g in into))
        return h.tanh()


def _half(gradient: Any) -> Any:
    return None if gradient is None else gradient / 2


@pytest.mark.parametrize("how", ["hook", "prehook"])
def test_hooks_on_nodes_of_the_graph_are_called(how: str) -> None:
    assert_closed_and_same(Hooked(how), "hangs hooks on nodes")


class Looks(nn.Module):
    """Only asks whether there is a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.grad_fn is not None else x


def test_a_module_that_asks_for_a_graph_stays_open() -> None:
    assert not ps.capture(nn.Sequential(nn.Linear(6, 6), Looks()), (X,)).closed


def assert_closed_and_same(inner: nn.Module, why: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    program = ps.capture(model, (X,))
    assert why in program.closed["1"]
    assert_same_step(model, plain, program)


def assert_same_step(model: nn.Module, plain: nn.Module, program: ps.Program) -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, "replicas": 1}
    with ps.Pipeline(model, (X,), program=program, progress=None, audit=None, **options) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    for x, y in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
        (F.mse_loss(plain(x), y) / 4).backward()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert q[1].grad is not None
        assert p.grad is not None, name
        assert torch.equal(p.grad, q[1].grad), name
