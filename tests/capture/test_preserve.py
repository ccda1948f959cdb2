"""What belongs to the user's model stays as it is, in odd places too."""

from __future__ import annotations

import copy
import random
from collections import namedtuple
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture import preserve, untouched
from tests.zoo.special_models import WIDTH, Rescaled


class Stateful(nn.Module):
    """Keeps state in every way that Python offers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0
        self.total = torch.zeros(4)
        self.seen: list[int] = []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.total.add_(1)
        self.seen.append(len(x))
        self.steps = self.steps + 1
        return self.layer(x)


def test_capture_and_profile_leave_state_alone() -> None:
    model = nn.Sequential(Stateful(), nn.Linear(4, 4))
    total, steps = model[0].total, model[0].steps
    program = ps.capture(model, (torch.randn(8, 4),))
    ps.profile(program, devices=["cpu"])
    assert (model[0].count, model[0].seen) == (0, [])
    assert model[0].total is total
    assert model[0].steps is steps
    assert total._version == steps._version == 0
    assert float(total.sum()) == float(steps) == 0


def test_lowering_leaves_what_is_frozen_frozen() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(6, 4)
    model[1].eval()
    program = ps.capture(model, (x,))
    program.stages((1,), training=True)
    program(x)
    assert model.training
    assert not model[1].training
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_modules_are_put_back() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(torch.jit.script(inner), nn.Linear(4, 4))
    program = ps.capture(model, (torch.randn(8, 4),))
    ps.profile(program, devices=["cpu"])
    assert program.closed["0"] == "it is compiled by torch.jit"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(float(b.sum()) == (4 if n.endswith("var") else 0) for n, b in model.named_buffers())
    assert all(module.training for module in model.modules())


def test_what_a_block_of_code_changes_is_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    state = torch.get_rng_state()
    with untouched(model):
        model.eval()
        model[0].running_mean.add_(1)
        model[0].note = torch.rand(3)
        model[1].weight = nn.Parameter(torch.zeros(4, 4))
        model.extra = nn.Linear(1, 1)
    assert all(module.training for module in model.modules())
    assert float(model[0].running_mean.sum()) == 0
    assert not hasattr(model[0], "note")
    assert not hasattr(model, "extra")
    assert float(model[1].weight.detach().abs().sum()) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_that_the_forward_writes_are_put_back() -> None:
    model = Rescaled()
    before = {name: (p._version, p.detach().clone()) for name, p in model.named_parameters()}
    ps.capture(model, (torch.randn(6, WIDTH),))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][1]), name
        assert parameter._version == before[name][0], name


def test_large_parameters_that_the_forward_writes_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preserve, "_MOST_BYTES", 10)
    ps.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(6, 4),))
    with pytest.raises(ps.CaptureError, match="writes parameters that are too large"):
        ps.capture(Rescaled(), (torch.randn(6, WIDTH),))


class Installs(nn.Module):
    """Hooks its layers when it is first called, and returns what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.installed = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda m, a, out: SEEN.get([]).append(out))
            self.installed = True
        token = SEEN.set([])
        for layer in self.layers:
            x = layer(x).relu()
        seen = SEEN.get()
        SEEN.reset(token)
        return x, *seen


SEEN: ContextVar[list[torch.Tensor]] = ContextVar("SEEN")


def test_hooks_that_a_first_forward_installs_do_not_close_the_module() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Installs()), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert program.labels == ("0", "1.layers.0", "1.relu()", "1.layers.1", "1.relu()")
    assert not program.closed
    assert not model[1].installed
    assert not any(layer._forward_hooks for layer in model[1].layers)
    expected = copy.deepcopy(model)(x)
    assert all(torch.equal(a, b) for a, b in zip(program(x), expected, strict=True))
    assert len(expected) == 3


class Caches(nn.Module):
    """Makes a tensor when it is first called, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return self.inner(x) + self.table


def test_tensors_that_a_first_forward_keeps_do() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Caches()), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert program.closed == {"1": "its forward assigns to self.table"}
    assert model[1].table is None
    assert torch.equal(program(x), model(x))


class Writes(nn.Module):
    """Changes a weight where no version counter shows it, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)
        self.torch = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.weight.data.clamp_(-0.1, 0.1)
        noise = self.numpy.random() + self.python.random() + torch.rand(1, generator=self.torch)
        return self.inner(x + 0 * noise)


def test_data_that_is_written_and_generators_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Writes())
    weight = model[1].inner.weight.detach().clone()
    assert weight.abs().max() > 0.1
    program = ps.capture(model, (torch.randn(6, 4),))
    assert torch.equal(model[1].inner.weight, weight)
    assert program.written == {"1.inner.weight"}
    ps.profile(program, devices=["cpu"], num_microbatches=1)
    assert torch.equal(model[1].inner.weight, weight)
    assert model[1].numpy.random() == np.random.default_rng(1).random()
    assert model[1].python.random() == random.Random(1).random()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(1, generator=model[1].torch), expected)


class CachesInADictionary(nn.Module):
    """Keeps what it made of a parameter, in evaluation, by the name of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.inner(x) + self.bias * 2
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.bias * 2
        return self.inner(x) + self.kept["cpu"]


def test_what_a_first_forward_keeps_in_a_dictionary() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), CachesInADictionary()), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert program.closed == {"1": "its forward assigns to self.kept"}
    assert not model[1].kept
    for training in (True, False):
        model.train(training)
        assert torch.equal(program(x), model(x))


class OwnOutput(nn.Module):
    """Makes the class of its results when it is first called, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        results = {"hidden": self.first(x)}
        results["prediction"] = self.last(results["hidden"].tanh())
        if not hasattr(self, "output_class"):
            self.output_class = namedtuple("Output", results)
        return self.output_class(**results)


class NewOutput(OwnOutput):
    """Makes the class anew at every call."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return namedtuple("Output", ["hidden", "prediction"])(hidden, self.last(hidden))


@pytest.mark.parametrize("kind", [OwnOutput, NewOutput])
def test_classes_of_results_that_a_forward_makes_close_nothing(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(6, 4)
    program = ps.capture(model, (x,))
    assert len(program) in (2, 3)
    assert not program.closed
    for rows in (2, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(program(x).prediction, model(x).prediction)
