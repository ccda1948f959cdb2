"""Calls of a model without `generate`: how many kinds of inputs are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import StatesLost
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


class Losing:
    """Sessions of workers that lose what the call of this input was given, so many times."""

    def __init__(self, failures: dict[str, int]) -> None:
        self.failures = failures
        self.session = self

    def kinds(self, *_: Any) -> tuple[bool, int]:
        return True, 0

    def open(self) -> Any:
        return self

    def start(self, _: Any, args: Any, kwargs: Any) -> Any:
        return SimpleNamespace(session=self, given=args[0])

    def finish(self, under_way: Any) -> str:
        given = under_way.given
        if self.failures[given] > 0:
            self.failures[given] -= 1
            raise StatesLost("a worker was replaced")
        return str(given)

    def fetch(self, result: Any) -> Any:
        return result


def test_who_is_given_up_with_another_has_all_its_beginnings_left() -> None:
    work = Predictor(Losing({"bad": 99, "good": 0}), 2, kinds=0)  # type: ignore[arg-type]
    bad, good = Prediction(("bad",), {}), Prediction(("good",), {})
    work.add(bad)
    work.add(good)
    while not bad.is_over:
        work.step()
    assert isinstance(bad.error, StatesLost)
    work._sessions.failures["good"] = 4  # type: ignore[attr-defined]
    while not work.is_idle:
        work.step()
    assert (good.result, good.error) == ("good", None)
