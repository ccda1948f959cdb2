"""Closed modules that use other ones, to which attributes lead that register nothing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.outside import common_owner
from tests.support.training import train_beside

X, Y = torch.randn(8, 6), torch.randn(8, 4)


class Leaf(nn.Module):
    """A closed module that uses something of another one."""

    def __init__(self, other: nn.Module, how: str, what: str) -> None:
        super().__init__()
        self.what = what
        if how == "list":
            self.other: Any = [other]
        elif how == "method":
            self.other = other.get_submodule  # whose object it is
        elif how == "partial":
            self.other = partial(isinstance, other)
        else:
            object.__setattr__(self, "other", other)

    def found(self) -> Any:
        """The other module."""
        if isinstance(self.other, list):
            return self.other[0]
        if isinstance(self.other, partial):
            return self.other.args[0]
        return self.other if isinstance(self.other, nn.Module) else self.other.__self__

    def forward(self, x: Tensor) -> Tensor:
        if (x > 1e9).any():
            return x
        other = self.found()
        if self.what == "number":
            return x * other.temperature
        if self.what == "weight":
            return x * other.first.weight.sum()
        if self.what == "call":
            return x + F.pad(other.last(x), (0, 4))
        return x * other.scale


class Parent(nn.Module):
    """Has a leaf that refers to it."""

    def __init__(self, how: str, what: str) -> None:
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(()))
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.leaf = Leaf(self, how, what)

    def forward(self, x: Tensor) -> Tensor:
        """Goes through the leaf in the middle."""
        out: Tensor = self.last(self.leaf(self.first(x).relu()))
        return out


HOW = ["list", "method", "partial", "attribute"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["weight", "call", "buffer"])
def test_tensors_of_others_are_never_apart_from_who_uses_them(how: str, what: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Parent(how, what), nn.Linear(4, 4))
    program = ps.capture(model, (X,))
    assert [call.label for call in program.train.calls] == ["0", "1", "2"]
    names = {"weight": "first.weight", "call": "last.weight", "buffer": "scale"}
    assert f"1.leaf uses 1.{names[what]}, which it does not contain" in program.closed["1"]


@pytest.mark.parametrize("what", ["weight", "number"])
def test_they_train_as_the_plain_model(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Parent("list", what), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=4, replicas=1) as pipe:
        train_beside(pipe, plain, X, Y, steps=3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("how", HOW)
def test_attributes_of_others_follow(kind: Any, how: str) -> None:
    torch.manual_seed(0)
    model = Parent(how, "number")
    options: Any = {"devices": ["cpu"] * 2, "cuts": ["leaf"], "num_microbatches": 4, "audit": None}
    with ps.Pipeline(model, (X,), workers=kind, **options) as pipe:
        for model.temperature in (1.0, 3.0, 0.5):
            found = pipe(X)
            assert torch.equal(found, torch.cat([model(x) for x in X.tensor_split(4)]))


def test_a_leaf_that_only_refers_to_others_is_no_reason_to_close_them() -> None:
    program = ps.capture(Parent("list", "number"), (X,))
    assert [call.label for call in program.train.calls] == ["first", "relu()", "leaf", "last"]


@pytest.mark.parametrize("kind", ["dtype", "device", "shape", "first"])
def test_what_others_are_like_is_no_use_of_them(kind: str) -> None:
    class Like(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.other = [other]

        def forward(self, x: Tensor) -> Tensor:
            if (x > 1e9).any():
                return x
            weight = self.other[0].weight
            if kind == "dtype":
                return x.to(weight.dtype)
            if kind == "device":
                return x.to(weight.device)
            if kind == "shape":
                return x * weight.shape[0]
            return x.to(next(self.other[0].parameters()).device)

    layer = nn.Linear(6, 8)
    program = ps.capture(nn.Sequential(layer, Like(layer), nn.Linear(8, 4)), (X,))
    assert [call.label for call in program.train.calls] == ["0", "1", "2"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiled_modules_are_not_looked_into() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    program = ps.capture(nn.Sequential(nn.Linear(6, 8), scripted, nn.Linear(8, 4)), (X,))
    assert [call.label for call in program.train.calls] == ["0", "1", "2"]


def test_the_innermost_owner() -> None:
    assert common_owner(["a.b.c", "a.b", "a.b.d"]) == "a.b"
    assert common_owner(["a", "b"]) == ""
    assert common_owner(["", "b"]) == ""
    assert common_owner(["a.b"]) == "a.b"
