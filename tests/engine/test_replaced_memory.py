"""Forwards that change weights and buffers by other names, or give them other memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.attributes import alike
from penstock.engine.state import State
from tests.support.training import train_beside

X, Y = torch.randn(8, 6), torch.randn(8, 4)


class Aliased(nn.Module):
    """Halves the weight of its layer in every forward, by a name that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(8, 8)
        memory = self.layer.weight.data
        self.also: Any = [memory] if how == "list" else memory[2:4] if how == "view" else memory
        if how == "buffer":
            del self.also
            self.register_buffer("also", memory)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "itself":
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        else:
            (self.also[0] if self.how == "list" else self.also).mul_(0.5)
        if self.how == "open":
            return F.linear(x, self.layer.weight, self.layer.bias)
        out: Tensor = self.layer(x)
        return out


def model_with(module: nn.Module) -> nn.Sequential:
    """A model of five layers, the second of which is this one."""
    return nn.Sequential(nn.Linear(6, 8), module, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


NAMES = ["itself", "attribute", "list", "view", "buffer", "open"]


@pytest.mark.parametrize("how", NAMES)
def test_no_cut_between_a_change_of_a_weight_and_its_use(how: str) -> None:
    program = ps.capture(model_with(Aliased(how)), (X,))
    labels = [call.label for call in program.train.calls]
    at = labels.index("1.mul_()") + (2 if how == "view" and "1.view()" in labels else 1)
    assert str(program.cuts.forbidden(at)).endswith("is changed in place and used on both sides")
    assert program.cuts.forbidden(at + 1) is None


def test_no_cut_after_a_closed_module_has_changed_the_weight_of_another() -> None:
    class Closed(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.register_buffer("weight", weight)

        def forward(self, x: Tensor) -> Tensor:
            if (x > 1e9).any():
                return x
            self.weight.mul_(0.5)
            return x * 1

    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), Closed(layer.weight.data), layer, nn.Linear(8, 4))
    program = ps.capture(model, (X,))
    assert [call.label for call in program.train.calls] == ["0", "1", "2", "3"]
    assert "used on both sides" in str(program.cuts.forbidden(2))
    assert program.cuts.forbidden(3) is None


class Normed(nn.Module):
    """Divides by a running mean, which has other memory after every forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.ones(8))
        self.held = [torch.ones(8)]

    def forward(self, x: Tensor) -> Tensor:
        mean = self.held[0] if "held" in self.how else self.mean
        new = mean * 0.9 + x.detach().abs().mean(0) * 0.1
        if "set" in self.how:
            mean.set_(new)
        else:
            mean.data = new
        return x / mean


class Shrinking(nn.Linear):
    """Gives its weight other memory in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Of a smaller weight."""
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


def made(how: str) -> nn.Module:
    """A model with one of these."""
    torch.manual_seed(0)
    return model_with(Shrinking(8, 8) if how == "weight" else Normed(how))


def trained(how: str, **options: Any) -> None:
    """Compare two steps with a loop of plain PyTorch."""
    model = made(how)
    plain = copy.deepcopy(model)
    options = {
        "devices": ["cpu"] * 2,
        "replicas": 1,
        "num_microbatches": 4,
        "audit": None,
    } | options
    with ps.Pipeline(model, (X,), progress=None, **options) as pipe:
        train_beside(pipe, plain, X, Y, steps=2)
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if how != "weight":
        assert torch.equal(model[1].held[0], plain[1].held[0])  # type: ignore[index]


REPLACED = ["mean", "mean held", "set", "set held", "weight"]


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("recompute", ["all", "boundaries"])
def test_recomputed_with_the_memory_of_then(how: str, recompute: str) -> None:
    trained(how, cuts=["2"], schedule="gpipe", recompute=recompute)


@pytest.mark.parametrize("how", ["mean", "mean held", "weight"])
def test_worker_processes_give_the_driver_what_is_there(how: str) -> None:
    trained(how, cuts=["2"], schedule="gpipe", recompute="none", workers="processes")


def test_recomputed_in_worker_processes() -> None:
    trained("set", cuts=["2"], schedule="gpipe", recompute="all", workers="processes")


def test_replicas_in_processes_refuse_it() -> None:
    with pytest.raises(ps.InputError, match=r"replaced the data of a tensor of shape \(8, 8\)"):
        trained("weight", replicas=2, workers="processes")


def test_a_failed_pass_leaves_the_driver_what_it_had() -> None:
    model = made("mean")
    before = copy.deepcopy(model.state_dict())
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(0)
        if target[0, 0] == Y[-1, 0]:
            raise ValueError("no loss")
        return F.mse_loss(output, target)

    options: Any = {"devices": ["cpu"] * 2, "cuts": ["2"], "num_microbatches": 8, "audit": None}
    with ps.Pipeline(model, (X,), workers="processes", progress=None, **options) as pipe:
        with pytest.raises(ps.WorkerError, match="no loss"):
            pipe.train_step(X, target=Y, loss_fn=loss_fn)
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        plain = made("mean")
        for x, y in zip(X, Y, strict=True):
            (F.mse_loss(plain(x[None]), y[None]) / 8).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_tensors_that_only_lie_side_by_side_are_cut_apart() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3))
    )
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.data = part.view_as(tensor)
    program = ps.capture(model, (X,))
    assert not any(program.cuts.forbidden(k) for k in range(1, len(program)))


def test_an_inference_tensor_is_put_back() -> None:
    with torch.inference_mode():
        buffer = torch.ones(3)
    state = State([], [buffer])
    with torch.inference_mode():
        buffer.add_(1)
        state.put_back()
    assert torch.equal(buffer, torch.ones(3))


def test_names_that_share_some_memory() -> None:
    memory = torch.zeros(12)
    tensors = {"a": memory[:4], "b": memory[2:6], "c": memory[6:8], "d": memory[7:], "e": X}
    assert alike(tensors.items()) == {"a": "a", "b": "a", "c": "c", "d": "c", "e": "e"}
    found = alike([("all", memory), *tensors.items()])
    assert found == dict.fromkeys([*"abcd", "all"], "a") | {"e": "e"}


def test_fewer_elements_of_the_same_memory_are_refused_in_processes() -> None:
    class Shrunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            if (x > 1e9).any():
                return x
            self.held.data = self.held.data[: max(4, len(self.held) - 1)]
            return x * self.held[0]

    options: Any = {"devices": ["cpu"] * 2, "cuts": ["2"], "num_microbatches": 4, "audit": None}
    model = model_with(Shrunk())
    with (
        ps.Pipeline(model, (X,), workers="processes", progress=None, **options) as pipe,
        pytest.raises(ps.InputError, match=r"replaced the data of a tensor of shape \(8,\)"),
    ):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
