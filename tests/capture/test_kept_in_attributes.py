"""A module that changes its attributes has all of its calls in one stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.training import assert_same_gradients

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(8, 6)


class Fade(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h / self.calls


def model() -> nn.Sequential:
    torch.manual_seed(1)
    fade = Fade()
    layers = [nn.Linear(6, 6), fade, nn.Linear(6, 6), fade, nn.Linear(6, 6), nn.Linear(6, 6)]
    return nn.Sequential(*layers)


def test_calls_of_a_module_that_counts_them_stay_together() -> None:
    split = model()
    plain = copy.deepcopy(split)
    program = ps.capture(split, (X,))
    first, last = (k for k, label in enumerate(program.labels) if label == "1")
    reasons = program.cuts.reasons
    assert [k for k in range(1, len(program)) if k in reasons] == list(range(first + 1, last + 1))
    assert all("what 1 keeps in attributes" in reason for reason in reasons.values())
    options = {"num_microbatches": 4, "audit": None, "replicas": 1, "progress": None}
    with ps.Pipeline(split, (X,), program=program, devices=["cpu"] * 2, **options) as pipe:
        assert_same_gradients(pipe, plain, X, Y)


def test_cuts_between_them_are_refused() -> None:
    with pytest.raises(ps.PlanError, match="what 1 keeps in attributes, which the forward changes"):
        ps.Pipeline(model(), (X,), devices=["cpu"] * 2, cuts=["2"], replicas=1)
