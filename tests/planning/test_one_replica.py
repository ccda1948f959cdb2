"""Which models get one replica where the number may be chosen, and what is said of the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.capture.one_replica import why_one_replica
from penstock.planning import planner
from tests.support.models import AddsItself

X = torch.randn(8, 6)


class Counts(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Replaces(nn.Module):
    """Replaces a buffer by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x * 2


class Draws(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.source)


class Moves(nn.Module):
    """Changes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9)
        return x - self.mean


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddsItself.apply(x, self.weight)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)  # type: ignore[no-any-return]


def captured(module: nn.Module) -> ps.Program:
    return ps.capture(nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6)), (X,))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Counts(), "a forward changes attributes of '1'"),
        (Replaces(), "a forward changes attributes of '1'"),
        (Draws(), "'1' has a random generator of its own, 'source'"),
        (Moves(), "a forward changes '1.mean', a buffer of Moves"),
        (nn.utils.spectral_norm(nn.Linear(6, 6)), "a forward changes"),
    ],
)
def test_what_forwards_find_again(module: nn.Module, words: str) -> None:
    assert words in why_one_replica(captured(module))


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(6)])
def test_others_may_have_several(module: nn.Module) -> None:
    assert why_one_replica(captured(module)) == ""


@pytest.mark.parametrize("module", [Reversible, Checkpointed])
def test_a_backward_within_a_backward(module: type[nn.Module]) -> None:
    """Replicas in processes refuse it in the first step, and nobody has asked for replicas."""
    program = captured(module())
    first = ps.profile(program, devices=["cpu", "cpu"], seconds=0.1)
    assert "runs another backward" in first.one_replica
    plan = ps.plan(first)
    assert plan.replicas == 1
    assert plan.note == first.one_replica or plan.way == "one device"
    assert ps.profile(captured(nn.Tanh()), devices=["cpu"], seconds=0.1).one_replica == ""


def test_it_is_known_of_a_profile_that_was_kept() -> None:
    for _ in range(2):
        model = nn.Sequential(nn.Linear(6, 6), Reversible(), nn.Linear(6, 6))
        with ps.Pipeline(model, (X,), devices=["cpu", "cpu"]) as pipe:
            assert pipe.plan.replicas == 1
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_several_that_are_asked_for_are_told_where_they_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def enough(*args: object, **options: object) -> ps.Plan:
        raise ps.PlanError("enough")

    monkeypatch.setattr(planner, "plan_for", enough)
    said = []
    for module in (Moves(), nn.Tanh()):
        model = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6))
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "penstock"),
            pytest.raises(ps.PlanError, match="enough"),
        ):
            ps.Pipeline(model, (X,), devices=["cpu", "cpu"], replicas=2)
        said.append([record.message for record in caplog.records])
    ((waits,), nothing) = said
    assert "one micro-batch after the other where a forward changes '1.mean'" in waits
    assert not nothing
