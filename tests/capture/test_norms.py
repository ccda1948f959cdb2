"""BatchNorms with a forward of their own: which of them use their statistics as torch's do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.norms import only_normalises
from penstock.capture.one_replica import why_in_turns
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.oracle import Oracle


class WithAct(nn.BatchNorm1d):
    """As in timm: the same computation in a forward of its own, and an activation."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        chosen = self.training or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            chosen,
            factor,
            self.eps,
        )
        result: torch.Tensor = self.act(self.drop(x))
        return result


class Subtracting(WithAct):
    """Its backward needs the statistics that its forward found."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(self.running_var + self.eps)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.1, self.eps
        )


class Within(WithAct):
    """What its backward saved is changed in the same forward, unseen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(
            x * self.running_var, self.running_mean, self.running_var, training=True
        )


class Renamed(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.running_var
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * scale


class ByBuffers(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * self._buffers["running_var"]


class Twice(WithAct):
    """In the second call, as in evaluation, the backward uses the statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        F.batch_norm(x.detach(), mean, var, training=True)
        return F.batch_norm(x, mean, var, training=False)


class AsWeight(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, weight=var, training=True)


class Warming(WithAct):
    """After two calls it uses the statistics as in evaluation."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mean, var = self.running_mean, self.running_var
        if self.calls % 3 == 0:
            return F.batch_norm(x, mean, var, training=False)
        return F.batch_norm(x, mean, var, training=True)


def hooked(features: int) -> nn.BatchNorm1d:
    """Torch's own, of whose statistics a hook makes something."""
    norm = nn.BatchNorm1d(features)
    norm.register_forward_hook(scaled)
    return norm


def scaled(norm: nn.BatchNorm1d, args: Any, x: torch.Tensor) -> torch.Tensor:
    assert norm.running_var is not None
    return x * norm.running_var


def patched(features: int) -> nn.BatchNorm1d:
    """Torch's own, with another forward."""
    norm = nn.BatchNorm1d(features)
    norm.forward = functools.partial(forward_of, norm)  # type: ignore[method-assign]
    return norm


def forward_of(norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    return scaled(norm, (), nn.BatchNorm1d.forward(norm, x))


def closure(features: int) -> nn.BatchNorm1d:
    """The same by a function that knows it, so that whatever is profiled runs this one."""
    norm = nn.BatchNorm1d(features)
    norm.forward = lambda x: forward_of(norm, x)  # type: ignore[method-assign]
    return norm


OTHERS = (
    *(Subtracting, Within, Renamed, ByBuffers, Twice, AsWeight, Warming),
    *(hooked, patched, closure),
)


def test_those_that_only_normalise() -> None:
    assert only_normalises(nn.BatchNorm1d(2))
    assert not only_normalises(nn.LayerNorm(2))
    for made in (WithAct, *OTHERS):
        assert not only_normalises(made(2))


def test_those_of_timm_only_normalise() -> None:
    tolerate_missing_torchvision_operators()
    norms = pytest.importorskip("timm.layers.norm_act")
    norm = norms.BatchNormAct2d(2)
    assert only_normalises(norm)
    norm.act.register_forward_hook(scaled)
    assert not only_normalises(norm)


def net(kind: Callable[[int], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), kind(6), nn.Linear(6, 6), kind(6), nn.Linear(6, 6))


@pytest.mark.usefixtures("one_thread", "pool")
@pytest.mark.parametrize("kind", [WithAct, *OTHERS])
@pytest.mark.parametrize(
    ("workers", "replicas"), [("threads", 1), ("threads", 2), ("processes", 1), ("processes", 2)]
)
def test_bits(kind: Callable[[int], nn.Module], workers: ps.Kind, replicas: int) -> None:
    if workers == "processes" and (kind is closure or (replicas == 2 and kind is not WithAct)):
        pytest.skip("it cannot be sent to processes, or replicas there refuse it")
    torch.manual_seed(1)
    batches = [(torch.randn(16, 6), torch.randn(16, 6)) for _ in range(3)]
    expected, given = net(kind), net(kind)
    plain = torch.optim.SGD(expected.parameters(), 0.1)
    for x, y in batches:
        plain.zero_grad()
        Oracle(expected, (x,), {}, 4).train_step(0, F.mse_loss, y)
        plain.step()
    with ps.Pipeline(
        given,
        (batches[0][0],),
        devices=["cpu"] * 2,
        workers=workers,
        replicas=replicas,
        num_microbatches=4,
        cuts=["2"] if replicas == 1 else None,
        audit=None,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for x, y in batches:
            optimizer.zero_grad()
            pipe.train_step(x, target=y, loss_fn=F.mse_loss)
            optimizer.step()
        found = pipe.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def test_replicas_run_at_the_same_time() -> None:
    assert why_in_turns(ps.capture(net(WithAct), (torch.ones(4, 6),))) == ""
