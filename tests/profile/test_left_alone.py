"""Profiling and measuring leave the user's model alone, also where a forward knows its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.oracle import Oracle

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def closed(module: nn.Module) -> Callable[..., Any]:
    before = module.forward
    return lambda x: before(x)


def given(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(type(module).forward, module)


def bound(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(module.forward)


def wrapped(module: nn.Module) -> Callable[..., Any]:
    """As Accelerate does."""
    return functools.update_wrapper(given(module), module.forward)  # type: ignore[return-value]


def patched(patch: Callable[[nn.Module], Callable[..., Any]]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    for module in model:
        module.forward = patch(module)  # type: ignore[method-assign]
    return model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("patch", [closed, given, bound, wrapped])
def test_a_forward_that_knows_its_module(
    patch: Callable[[nn.Module], Callable[..., Any]], tune: bool
) -> None:
    expected, model = patched(patch), patched(patch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    options: dict[str, Any] = {"num_microbatches": 2, "cuts": ["1"], "replicas": 1, "audit": None}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, tune=tune, **options) as pipe:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
        for _ in range(2):
            Oracle(expected, (X,), {}, 2).train_step(0, F.mse_loss, Y)
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            pipe.replan()
        for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.equal(own.grad, other.grad), name


class Scaling(nn.Module):
    """A function in an attribute, which has an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(torch.mul)
        self.act.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(x, self.act.scale)  # type: ignore[attr-defined]
        return result


class Expanding(nn.Module):
    """Its buffer has one element, and shows four."""

    number: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number = (self.number[:1] + 1).expand(4)
        return x + self.number


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("kind", [Scaling, Expanding])
def test_attributes_of_other_kinds(kind: type[nn.Module], tune: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "audit": None}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, tune=tune, **options) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_a_graph_of_before_can_still_be_used() -> None:
    """The statistics are not written, so what autograd saved of them is as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    loss = (model(X) * model[1].running_var).sum()
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "audit": None}
    ps.Pipeline(model, (X,), devices=["cpu"] * 2, tune=True, **options).close()
    loss.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torch_jit_is_profiled() -> None:
    jit: Any = torch.jit
    model = nn.Sequential(nn.Linear(4, 4), jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, audit=None) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
