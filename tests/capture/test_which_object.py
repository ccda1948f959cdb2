"""Modules that look at values and give their input, where Python asks which object it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


class Guard(nn.Module):
    """What it is given, if that is finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x) if torch.isnan(x).any() else x


def are_the_same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 3 if x is y else y


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "is": lambda x, y: x if y is x else x * 3,
    "later": lambda x, y: are_the_same(x, y),
    "id": lambda x, y: y * (1 + (id(x) == id(y))),
    "view": lambda x, y: y * (1 + y._is_view()),
    "unasked": lambda x, y: x + y,
}


class Guarded(nn.Module):
    """Layers around a guard."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.guard, self.last = nn.Linear(4, 4), Guard(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.last(USES[self.how](x, self.guard(x)))


@pytest.mark.parametrize("how", USES)
def test_it_is_what_it_was_or_refused(how: str) -> None:
    model = Guarded(how)
    program = ps.capture(model, (X,))
    assert torch.equal(program(X), model(X))
    assert torch.equal(program(X[:3] * 2), model(X[:3] * 2))
    other = X.clone()
    other[1] = float("nan")
    with pytest.raises(ps.InputError, match="guard gives one of its arguments, or none, unlike"):
        program(other)
