"""Closed modules that draw nothing as they are recorded, and are switched on by a value later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.code import may_draw

pytestmark = pytest.mark.usefixtures("pool")

X, Y = torch.randn(8, 6), torch.randn(8, 6)


class Noise(nn.Module):
    """Adds noise, unless there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.std * torch.randn_like(x) if self.std else x


class Path(nn.Module):
    """Leaves out rows while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.p: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.p or not self.training:
            return x
        return x * torch.bernoulli(torch.full((len(x), 1), 1 - self.p))


def noisy(x: torch.Tensor, std: float) -> torch.Tensor:
    return x + std * torch.randn_like(x) if std else x


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any) -> Any:
        return function(*args)

    return called


class Helped(nn.Module):
    """A function draws, by the numbers of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(std=0.0)

    @as_it_is
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x, self.settings.std)


class Kept(nn.Module):
    """Keeps everything with probability 1."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full_like(x, self.keep)) if self.keep < 1 else x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, 2, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x[None])[0][0]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, float], None]]] = {
    "dropout": (lambda: nn.Dropout(0.0), lambda m, p: setattr(m, "p", p)),
    "noise": (Noise, lambda m, p: setattr(m, "std", p)),
    "path": (Path, lambda m, p: setattr(m, "p", p)),
    "help": (Helped, lambda m, p: setattr(m.settings, "std", p)),
    "keep": (Kept, lambda m, p: setattr(m, "keep", 1 - p)),
    "gru": (Recurrent, lambda m, p: setattr(m.gru, "dropout", p)),
}


def model_with(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 6))


def losses(case: str, workers: Any, first: float, moments: range) -> list[torch.Tensor]:
    """Those of three steps, of which some have something to draw; every step is audited."""
    make, switch = CASES[case]
    torch.manual_seed(4)
    model = model_with(module := make())
    switch(module, first)
    torch.manual_seed(5)
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "audit": 1}
    found = []
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, workers=workers, **options) as pipe:
        for step in range(3):
            switch(module, 0.5 if step in moments else 0.0)
            before = torch.get_rng_state()
            found.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            assert torch.equal(torch.get_rng_state(), before)  # that is the script's own
    return found


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("case", CASES)
def test_they_draw_as_if_they_had_from_the_beginning(case: str, workers: str) -> None:
    late = losses(case, workers, 0.0, range(1, 3))
    early = losses(case, workers, 0.5, range(1, 3))
    assert list(map(torch.equal, late, early)) == [True] * 3
    assert not torch.equal(late[1], late[2])


def test_values_that_change_in_evaluation_record_nothing_again() -> None:
    model = model_with(dropout := nn.Dropout(0.0)).eval()
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1) as pipe:
        for step in range(12):
            dropout.p = step / 20
            pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)


def test_which_code_may_draw() -> None:
    assert may_draw(nn.Dropout, True)
    assert not may_draw(nn.Dropout, False)
    assert may_draw(Noise, False)
    assert not any(may_draw(kind, True) for kind in (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.GELU))
