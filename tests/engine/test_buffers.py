"""Buffers that a forward both writes and uses, against a plain loop over micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.devices.layout import alike
from penstock.engine.state import ValuesSaved

M = 4
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


pytestmark = pytest.mark.usefixtures("pool")


class Running(nn.Module):
    """Normalises by statistics that it moves first."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.std.mul_(0.9).add_(h.std(0, unbiased=False), alpha=0.1)
        return (h - self.mean) / self.std


class OpenRunning(Running):
    """The same, looked inside."""

    def __init__(self, features: int = 8) -> None:
        super().__init__(features)
        self.out = nn.Tanh()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(h))


class Renorm(nn.BatchNorm1d):
    """Batch renormalisation (Ioffe 2017): what it keeps takes part in training."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(h)
        mean, std = h.mean(0), h.std(0, unbiased=False) + self.eps
        with torch.no_grad():
            self.running_mean.add_(mean - self.running_mean, alpha=0.1)
            self.running_var.add_(std - self.running_var, alpha=0.1)
        r = (std.detach() / self.running_var).clamp(0.5, 2)
        d = ((mean.detach() - self.running_mean) / self.running_var).clamp(-1, 1)
        out = ((h - mean) / std * r + d) * self.running_var
        return out * self.weight + self.bias


class Codebook(nn.Module):
    """A code book that follows its inputs, with a commitment term."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, features))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            nearest = (h[:, None] - self.codes).square().sum(-1).argmin(-1)
            if self.training:
                chosen = F.one_hot(nearest, 5).to(h.dtype)
                self.codes.mul_(0.9).add_(chosen.T @ h, alpha=0.1)
        soft = (h @ self.codes.t()).softmax(-1) @ self.codes
        return soft * self.codes[0] + h


class Attributes(nn.Module):
    """A plain tensor in the place of a buffer."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.scale = torch.ones(features)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return h * self.scale


class OpenAttributes(Attributes):
    def __init__(self, features: int = 8) -> None:
        super().__init__(features)
        self.out = nn.Tanh()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(h))


class Written(nn.Module):
    """A parameter that its forward shrinks, without autograd's noticing."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data.mul_(0.9)
        return h * self.weight


class Given(nn.Module):
    """Hands out the buffer itself, which the next micro-batch changes."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.inner = Mean(features)
        self.other = nn.Linear(features, features)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mean = self.inner(h)
        return self.other(h.tanh()).tanh() * mean


class Mean(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return self.mean


def old_spectral(features: int = 8) -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(features, features))


def new_spectral(features: int = 8) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(features, features))


KINDS: list[Callable[[], nn.Module]] = [
    Running,
    OpenRunning,
    lambda: Renorm(8),
    Codebook,
    Attributes,
    OpenAttributes,
    Written,
    Given,
    old_spectral,
    new_spectral,
]
NAMES = [
    *("closed", "open", "renorm", "codebook", "attribute", "open attribute", "written", "given"),
    *("old spectral norm", "new spectral norm"),
]


def net(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), kind(), nn.Tanh(), nn.Linear(8, 8), kind(), nn.Linear(8, 4)
    )


def plain(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """One device that goes through the micro-batches one after the other."""
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for x, y in zip(X.tensor_split(M), Y.tensor_split(M), strict=True):
            loss = F.mse_loss(model(x), y)
            (loss * (len(x) / len(X))).backward()
            total = total + loss.detach() * (len(x) / len(X))
        losses.append(total)
    return losses


def attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: m.scale for n, m in model.named_modules() if isinstance(m, Attributes)}


def state(model: nn.Module) -> dict[str, Any]:
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    return {**model.state_dict(), **attributes(model), **gradients}


def assert_trained_alike(kind: Callable[[], nn.Module], **options: Any) -> None:
    mine = net(kind)
    held = attributes(mine)
    twin = copy.deepcopy(mine)
    expected = plain(twin, 2)
    with ps.Pipeline(mine, (X,), num_microbatches=M, **options, replicas=1) as pipe:
        for loss in expected:
            assert torch.equal(pipe.train_step(X, target=Y, loss_fn=F.mse_loss), loss)
        ours, theirs = state(mine), state(twin)
    for name, value in theirs.items():
        if name in held and options.get("workers") == "processes":
            continue  # plain attributes stay where the worker has them
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_threads(kind: Callable[[], nn.Module], recompute: str) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert_trained_alike(kind, devices=["cpu"] * 2, recompute=recompute, schedule=schedule)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_processes(recompute: str) -> None:
    """All kinds of layers in one model."""

    def kind() -> nn.Module:
        return nn.Sequential(*(make() for make in KINDS))

    options: dict[str, Any] = {"recompute": recompute, "schedule": "1f1b"}
    assert_trained_alike(kind, devices=["cpu"] * 2, workers="processes", **options)


class Centred(nn.Module):
    """A loss that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.centre.mul_(0.5).add_(output.mean(0), alpha=0.5)
        return ((output - target) * self.centre).square().mean()


def test_a_loss_that_remembers() -> None:
    mine = net(nn.Identity)
    twin, loss_fn = copy.deepcopy(mine), Centred()
    other = copy.deepcopy(loss_fn)
    for x, y in zip(X.tensor_split(M), Y.tensor_split(M), strict=True):
        (other(twin(x), y) / M).backward()
    with ps.Pipeline(
        mine, (X,), num_microbatches=M, devices=["cpu"] * 2, schedule="gpipe", replicas=1
    ) as pipe:
        pipe.train_step(X, target=Y, loss_fn=loss_fn)
    assert torch.equal(loss_fn.centre, other.centre)
    for ours, theirs in zip(mine.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_is_saved_otherwise_must_not_change() -> None:
    """Autograd still notices what a model does wrong."""
    kept = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    with ValuesSaved([torch.ones(2)])():
        result = (weight * kept).sum()
    kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda b: b[2:],
        lambda b: b[:, 1],
        lambda b: b[1].expand(3, 6),
        lambda b: b.t(),
        lambda b: b[1:3, 2:4],
    ],
)
def test_a_copy_is_laid_out_as_what_was_saved(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    buffer = torch.randn(5, 6)
    part = view(buffer)
    copied = alike(part, torch.clone, sparse=True)
    assert torch.equal(copied, part)
    assert copied.stride() == part.stride()
    assert copied.data_ptr() % 64 == part.data_ptr() % 64
    weight = torch.ones_like(part).clone().requires_grad_()
    with ValuesSaved([buffer])():
        result = (weight * part).sum()
    before = part.clone()
    buffer.add_(1)
    result.backward()
    assert torch.equal(weight.grad, before)
