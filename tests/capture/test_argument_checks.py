"""Functions that look at values to check what they are given: their sizes are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock as ps
from tests.zoo.check import check
from tests.zoo.entry import Entry


def resynthesised(x: torch.Tensor) -> torch.Tensor:
    """`torch.istft` compares its window with zero."""
    window = torch.hann_window(16)
    spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
    return torch.istft(spectrum, 16, 4, window=window, length=x.shape[-1])


def covariance(x: torch.Tensor) -> torch.Tensor:
    """`torch.cov` looks whether its weights are positive."""
    return x @ torch.cov(x.T, aweights=torch.ones(len(x)))


class Asked(nn.Module):
    """Asks how large the result of a function is."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(self.first(x))
        return self.last(y.reshape(len(x), y.shape[-1]))


@pytest.mark.parametrize("function", [resynthesised, covariance])
def test_a_check_decides_no_size(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
        return (torch.randn(rows, 64),), {}

    assert ps.capture(Asked(function), inputs(4)[0]).closed == {}
    assert check(Entry("Asked", "plain", lambda: Asked(function), inputs)).status == "exact"
