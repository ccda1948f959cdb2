"""Arguments that are neither tensors nor plain data: an error says which, and they stay as is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps

X = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """Draws from a generator that it is given, in one of several ways."""

    def __init__(self, how: str = "torch") -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 6)
        self.how = how

    def forward(self, x: torch.Tensor, generator: Any = None) -> torch.Tensor:
        h = self.encoder(x)
        if self.how == "torch":
            h = h + torch.randn(h.shape[1:], generator=generator)
        elif self.how == "in place":
            h = h + torch.empty_like(h).normal_(generator=generator)
        elif self.how == "numpy" and generator is not None:
            h = h * generator.random()
        result: torch.Tensor = self.decoder(h)
        return result


@pytest.mark.parametrize("how", ["torch", "in place"])
@pytest.mark.parametrize("keep_closed", [[], [""]])
def test_a_generator_cannot_be_an_argument(how: str, keep_closed: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    with pytest.raises(ps.InputError, match=r"'generator' is a Generator.*torch.manual_seed"):
        ps.capture(Noisy(how), (X,), {"generator": generator}, keep_closed=keep_closed)
    assert torch.equal(generator.get_state(), before)


def test_nor_one_of_numpy() -> None:
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    with pytest.raises(ps.InputError, match="the argument 1 is a Generator"):
        ps.capture(Noisy("numpy"), (X, generator))
    assert generator.bit_generator.state == before


def test_one_that_is_not_used_does_no_harm() -> None:
    model = Noisy("none").eval()
    arguments = (X,), {"generator": torch.Generator()}
    assert torch.equal(ps.capture(model, *arguments).replay(*arguments, None), model(X))


class Context:
    def __init__(self) -> None:
        self.scale = 2.0


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return x * context.scale


class WithContext(nn.Module):
    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.linear, self.scaled = nn.Linear(6, 6), Scaled()
        self.returned = returned

    def forward(self, x: torch.Tensor, options: dict[str, Context]) -> Any:
        context = options["context"]
        if self.returned:
            return self.linear(x), context
        return self.scaled(self.linear(x), context)


@pytest.mark.parametrize("returned", [False, True])
def test_an_object_cannot_be_passed_on(returned: bool) -> None:
    with pytest.raises(ps.InputError, match=r"argument 1\.'context' is a Context.*attribute"):
        ps.capture(WithContext(returned), (X, {"context": Context()}))


class DynamicCache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, past: DynamicCache | None = None) -> Any:
        keys = self.linear(x)
        if past is not None:
            past.keys.append(keys)
        return keys, past


def test_nor_can_a_cache_in_a_later_call() -> None:
    pipe = ps.Pipeline(Attending().eval(), (X,), devices=1)
    with pipe, torch.no_grad():
        pipe(X)
        with pytest.raises(ps.InputError, match=r"'past' is a DynamicCache.*Pipeline.session"):
            pipe(X, past=DynamicCache())
        pipe(X)
