"""Modules that call functions which torch.compile has made stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def _activation(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * 2 + 1


_compiled: Any = torch.compile(_activation, backend="eager")


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.how = how
        if how == "attribute":
            self.activation = _compiled
        if how == "forward":
            self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]

    def activate(self, x: torch.Tensor) -> Any:
        return _compiled(x)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.inner(x)
        return self.activation(h) if self.how == "attribute" else F.gelu(h)


class Naming(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return self.activate(self.inner(x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = self.inner(x).view(len(x), 1, 3, 8).unsqueeze(3).unbind(2)
        result: Any = flex_attention(q, k, v)
        return x + result.flatten(1)


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("how", ["named", "attribute", "forward", "flex_attention"])
def test_they_run_as_they_are(how: str) -> None:
    torch.manual_seed(0)
    block = {"named": Naming, "flex_attention": lambda _: Attending()}.get(how, Block)(how)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8))
    if how == "flex_attention":  # which has no backward on CPUs
        model.requires_grad_(False)
    program = ps.capture(model, (X,))
    assert [call.label for call in program.train.calls] == ["0", "1", "2"]
    assert "torch.compile" in program.closed["1"]
    assert torch.equal(program.replay((X,), {}, None), model(X))


def test_a_function_that_is_never_compiled_is_open() -> None:
    plain = torch.compiler.disable(_activation)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.activation = nn.Linear(8, 8), plain

        def forward(self, x: torch.Tensor) -> Any:
            return self.activation(self.inner(x))

    assert not ps.capture(Model(), (X,)).closed


class Alike(nn.Module):
    """Has an attribute of the same name as a compiled function that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.other(self._compiled(x))


def test_an_attribute_of_the_same_name_is_another_thing() -> None:
    assert not ps.capture(Alike(), (X,)).closed
