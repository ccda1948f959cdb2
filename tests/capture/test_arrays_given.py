"""Arrays of numpy among the arguments: constants, until another one is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(8, 6)
READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda a: float(a[0]),
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "tensor of a dtype": lambda a: torch.as_tensor(a, dtype=torch.float64),
}


class Scaled(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(6, 6), nn.Linear(6, 4), read

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.read(scale)


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("read", READS)
def test_what_the_array_holds_now_counts(read: str, workers: Any) -> None:
    model, array = Scaled(READS[read]), np.array([2.0], dtype=np.float32)
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "audit": None}
    with ps.Pipeline(model, (X, array), devices=["cpu"] * 2, workers=workers, **options) as pipe:
        for value in (2.0, 5.0, 2.0):
            array[0] = value
            expected = torch.cat([model(x, array) for x in X.split(4)])
            assert torch.equal(pipe(X, array), expected)
            assert torch.equal(pipe(X, np.array([value], dtype=np.float32)), expected)
