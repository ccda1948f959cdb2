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


def made(model: nn.Module, given: Any, workers: Any = "threads") -> ps.Pipeline:
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "audit": None}
    return ps.Pipeline(model, (X, given), devices=["cpu"] * 2, workers=workers, **options)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("read", READS)
def test_what_the_array_holds_now_counts(read: str, workers: Any, size: int) -> None:
    model, array = Scaled(READS[read]), np.full(size, 2.0, dtype=np.float32)
    with made(model, array, workers) as pipe:
        for value in (2.0, 5.0, 2.0):
            array[0] = value
            expected = torch.cat([model(x, array) for x in X.split(4)])
            assert torch.equal(pipe(X, array), expected)
            assert torch.equal(pipe(X, array.copy()), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, np.bool_])
def test_scalars_of_numpy(kind: Any) -> None:
    model = Scaled(lambda a: a)
    with made(model, kind(1)) as pipe:
        for value in (kind(1), kind(0), kind(1)):
            assert torch.equal(pipe(X, value), torch.cat([model(x, value) for x in X.split(4)]))


def test_arrays_that_hold_objects_or_masks() -> None:
    objects = np.array([2.0, np.ones(2)], dtype=object)
    model = Scaled(lambda a: a[0])
    with made(model, objects) as pipe:
        expected = torch.cat([model(x, objects) for x in X.split(4)])
        assert torch.equal(pipe(X, objects), expected)
        assert torch.equal(pipe(X, np.array([2.0, np.ones(2)], dtype=object)), expected)
    masked: Any = np.ma.MaskedArray([1.0, 2.0, 4.0], mask=[False, False, True])
    model = Scaled(lambda a: float(a.sum()))
    with made(model, masked) as pipe:
        for mask in ([False, False, True], [True, False, False]):
            masked.mask = mask
            expected = torch.cat([model(x, masked) for x in X.split(4)])
            assert torch.equal(pipe(X, masked), expected)
