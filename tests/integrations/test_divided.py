"""An optimizer of a framework's user that workers step: what is registered on it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.integrations.optimizers import Divided

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = torch.randn(6, 4), torch.randn(6, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def watched(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the hooks of an optimizer that were called, in order."""
    seen: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def note(of: Any, *_: Any) -> None:
            assert of is optimizer
            seen.append(name)

        return note

    optimizer.register_step_pre_hook(hook("before step"))
    optimizer.register_step_post_hook(hook("after step"))
    optimizer.register_state_dict_pre_hook(hook("before saving"))
    optimizer.register_state_dict_post_hook(hook("after saving"))
    optimizer.register_load_state_dict_pre_hook(hook("before loading"))
    optimizer.register_load_state_dict_post_hook(hook("after loading"))
    return seen


def used(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
    """Two steps, the state, one step more from that state, and the state after it."""
    for _ in range(2):
        step()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    step()
    optimizer.step()
    optimizer.load_state_dict(saved)
    step()
    optimizer.step()
    return optimizer.state_dict()["state"]


def test_hooks_of_the_optimizer_are_called() -> None:
    plain, net = network(), network()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, net)]
    seen = list(map(watched, optimizers))

    def alone() -> None:
        plain.zero_grad()
        F.mse_loss(plain(X), Y).backward()

    expected = used(optimizers[0], alone)
    options: Any = {"devices": 2, "num_microbatches": 1, "replicas": 1, "progress": None}
    with ps.Pipeline(net, (X,), **options) as pipe:

        def split() -> None:
            net.zero_grad()
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

        divided = Divided(optimizers[1], lambda _: pipe)
        found = used(optimizers[1], split)
        divided.gather()
    assert seen[1] == seen[0]
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    for k, values in expected.items():
        assert all(torch.equal(found[k][name], value) for name, value in values.items())
    assert optimizers[1].state_dict()["state"].keys() == expected.keys()
    assert "step" not in vars(optimizers[1])


def test_a_hook_that_changes_what_is_loaded() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    options: Any = {"devices": 2, "num_microbatches": 1, "replicas": 1, "progress": None}
    with ps.Pipeline(net, (X,), **options) as pipe:
        Divided(optimizer, lambda _: pipe)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.step()

        def without(of: Any, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "state": {}}

        optimizer.register_load_state_dict_pre_hook(without)
        optimizer.load_state_dict(optimizer.state_dict())
        net.zero_grad()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.step()
        for parameter in net.parameters():
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad)
