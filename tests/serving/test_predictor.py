"""Calls of a model without `generate`: how many kinds of inputs are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.serving.predictor import Prediction, Predictor
from penstock.serving.refusal import Refusal
from tests.support.models import mlp

pytestmark = pytest.mark.usefixtures("pool")


class Summing(nn.Module):
    """Takes texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.net(x).sum(1) * scale


def predicted(work: Predictor, x: torch.Tensor) -> Prediction:
    """A call that was brought to its end."""
    job = Prediction((x,), {})
    work.add(job)
    while not work.is_idle:
        work.step()
    assert job.is_over
    return job


def served(model: nn.Module, **options: Any) -> ps.Pipeline:
    x = torch.randn(2, 3, 4)
    fixed: dict[str, Any] = {"devices": 2, "replicas": 1, "num_microbatches": 1, "audit": None}
    return ps.Pipeline(model, (x,), inference=True, progress=None, **fixed, **options)


def recorded(pipe: ps.Pipeline) -> int:
    return len(list(pipe.program.recordings.traces()))


def test_kinds_of_inputs_are_bounded() -> None:
    """What is refused records nothing, and what was recorded is answered as before."""
    model = Summing().eval()
    with served(model) as pipe, torch.no_grad():
        work = Predictor(pipe._sessions, 2, kinds=2)
        for rows, length in [(2, 3), (5, 3), (2, 7), (1, 7), (2, 5), (4, 5)]:
            x = torch.randn(rows, length, 4)
            assert torch.equal(predicted(work, x).result, model(x))
        before = recorded(pipe)
        for length in range(8, 20):
            error = predicted(work, torch.randn(2, length, 4)).error
            assert isinstance(error, Refusal)
            assert error.status == 400
            assert f"[[2, {length}, 4]] are new, and 3 kinds of inputs" in error.message
        assert recorded(pipe) == before
        for length in (3, 5, 7):
            x = torch.randn(3, length, 4)
            assert torch.equal(predicted(work, x).result, model(x))
        work.close()


def test_dimensions_that_are_said_to_vary_are_of_one_kind() -> None:
    model = Summing().eval()
    with served(model, dynamic={"x": {1: "length"}}) as pipe, torch.no_grad():
        work, before = Predictor(pipe._sessions, 2, kinds=0), recorded(pipe)
        for length in range(2, 40):
            x = torch.randn(2, length, 4)
            assert torch.equal(predicted(work, x).result, model(x))
        assert recorded(pipe) == before
        work.close()
