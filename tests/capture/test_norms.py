"""BatchNorms with a forward of their own: which of them use their statistics as torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.norms import only_normalises
from penstock.capture.one_replica import why_in_turns
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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(
            x * self.running_var, self.running_mean, self.running_var, training=True
        )


class Renamed(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.running_var
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * scale


class ByMethod(WithAct):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return self.scaled(x)


class ByProperty(WithAct):
    @property
    def scale(self) -> torch.Tensor:
        assert self.running_var is not None
        return self.running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * self.scale


class ByName(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * getattr(self, "running_var")  # noqa: B009


class Passed(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return scaled_by(self, x)


class ByBuffers(WithAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x * dict(self.named_buffers())["running_var"]


class Another(WithAct):
    """What it calls `batch_norm` is something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, self.running_mean, self.running_var)


def scaled_by(norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    assert norm.running_var is not None
    return x * norm.running_var


def batch_norm(x: torch.Tensor, mean: Any, var: Any) -> torch.Tensor:
    x = x * var.clone()
    return F.batch_norm(x, mean, var, training=True)


OTHERS = (Subtracting, Within, Renamed, ByMethod, ByProperty, ByName, Passed, ByBuffers, Another)


def test_those_that_only_normalise() -> None:
    assert only_normalises(nn.BatchNorm1d(2))
    assert only_normalises(WithAct(2))
    assert not only_normalises(nn.LayerNorm(2))


@pytest.mark.parametrize("kind", OTHERS)
def test_those_that_may_do_something_else(kind: type[WithAct]) -> None:
    assert not only_normalises(kind(2))


def net(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), kind(6), nn.Linear(6, 6), kind(6), nn.Linear(6, 6))


@pytest.mark.usefixtures("one_thread", "pool")
@pytest.mark.parametrize("kind", [WithAct, Subtracting, Within, Renamed, ByMethod, Another])
@pytest.mark.parametrize(
    ("workers", "replicas"), [("threads", 1), ("threads", 2), ("processes", 1), ("processes", 2)]
)
def test_bits(kind: type[WithAct], workers: ps.Kind, replicas: int) -> None:
    if workers == "processes" and replicas == 2 and kind is not WithAct:
        pytest.skip("replicas in processes refuse it")
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
