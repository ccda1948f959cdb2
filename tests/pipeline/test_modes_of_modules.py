"""Modules in another mode than when they were recorded: what they draw and change is seen then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.comparison.reference import run_with_threads
from tests.support.models import replicated, uniform_plan

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
SHAPES = [("threads", 1, 1), ("threads", 2, 1), ("threads", 1, 4), ("processes", 1, 2)]
"""Workers, stages and replicas."""


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def dropping() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2))
    return nn.Sequential(*layers, nn.Linear(6, 6))


class Averages(nn.Module):
    """Subtracts an average that training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean


def rest(model: nn.Module, resting: bool = True) -> None:
    """Let only these be in evaluation mode, or in training mode."""
    for module in model.modules():
        if isinstance(module, (nn.Dropout, Averages)):
            module.train(not resting)


def run(model: nn.Module, prepared: Callable[[], None], step: Any, shape: Any) -> Any:
    """What a step gives on a model that is prepared after it was captured; draws nothing itself."""
    kind, stages, replicas = shape
    program = ps.capture(model, (X,))
    plan = replicated(uniform_plan(program, stages, 4, recompute="none"), replicas)
    options = {"plan": plan, "program": program, "devices": plan.devices, "audit": None}
    with ps.Pipeline(model, workers=kind, **options) as pipe:
        prepared()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        found = step(pipe)
        assert torch.equal(torch.get_rng_state(), before)
        return found


def trained(pipe: ps.Pipeline) -> list[torch.Tensor]:
    return [pipe.train_step(X, loss_fn=loss_of) for _ in range(2)]


def test_dropout_that_was_off_when_it_was_recorded() -> None:
    expected = run(dropping(), lambda: None, trained, SHAPES[0])
    for shape in SHAPES:
        model = dropping()
        rest(model)
        assert run(model, model.train, trained, shape) == expected


def test_dropout_that_was_off_when_another_way_was_recorded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Tanh(), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    found = []
    for resting in (False, True):
        model = nn.Sequential(*dropping(), Scaled())

        def steps(pipe: ps.Pipeline, model: nn.Module = model, resting: bool = resting) -> Any:
            rest(model, resting)
            model[-1].scale = 2.0
            pipe.train_step(X, loss_fn=loss_of)
            model.train()
            return pipe.train_step(X, loss_fn=loss_of)

        found.append(run(model, lambda: None, steps, SHAPES[1]))
    assert found[0] == found[1]


def test_dropout_in_evaluation() -> None:
    def evaluated(pipe: ps.Pipeline) -> torch.Tensor:
        with torch.no_grad():
            return pipe(X)  # type: ignore[no-any-return]

    found = []
    for shape in SHAPES:
        model = dropping()

        def prepared(model: nn.Module = model) -> None:
            model.eval()
            rest(model, False)

        found.append(run(model, prepared, evaluated, shape))
        assert not torch.equal(found[-1], run_with_threads(lambda m=model: m.eval()(X), 1))
    assert all(torch.equal(other, found[0]) for other in found)


class FirstIsLate(nn.Module):
    """The forward of the first micro-batch takes longest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05 * float(x[0, 0] == X[0, 0]))
        return self.linear(x)  # type: ignore[no-any-return]


def test_what_was_not_changed_when_it_was_recorded_is_changed_in_order() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(FirstIsLate(), Averages())

    plain = build()
    run_with_threads(lambda: [plain(x) for _ in "12" for x in X.chunk(4)], 1)
    for shape in SHAPES:
        model = build()
        rest(model)
        run(model, model.train, trained, shape)
        assert torch.equal(model[1].mean, plain[1].mean), shape
