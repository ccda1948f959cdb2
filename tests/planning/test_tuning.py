"""Measuring plans: with every one of them, and without a trace on the user's model."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.plan.request import Request
from penstock.planning.planner import plan_for
from penstock.planning.tuning import measured
from tests.support.models import uniform_plan

X = torch.randn(8, 6)
CPU = [torch.device("cpu")] * 2


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.ReLU()
    )


def test_every_plan_is_measured_in_every_round() -> None:
    program = ps.capture(net(), (X,))
    plans = [uniform_plan(program, 2, 4, name) for name in ("1f1b", "zero-bubble", "gpipe")]
    said: list[str] = []
    steps = measured(
        program, [X], plans, rounds=3, progress=lambda done, total, what: said.append(what)
    )
    assert [len(seconds) for seconds in steps] == [9, 9, 9]
    assert all(second > 0 for seconds in steps for second in seconds)
    assert said[:3] == ["measuring 1f1b", "measuring zero-bubble", "measuring gpipe"]


def test_plans_for_inference_are_measured_by_forwards_in_evaluation_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time from batch to batch, as many of which are under way as of `map`."""
    program, seen = ps.capture(net(), (X,)), []
    options: dict[str, Any] = {"inference": True, "replicas": 1, "num_microbatches": 2}
    costs = ps.profile(program, devices=["cpu", "cpu"], seconds=0.1, inference=True)
    plans = [ps.plan(costs, **options), ps.plan(costs, **{**options, "num_microbatches": 4})]
    forward = nn.BatchNorm1d.forward

    def noting(self: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
        seen.append((self.training, torch.is_grad_enabled()))
        return forward(self, x)

    monkeypatch.setattr(nn.BatchNorm1d, "forward", noting)
    said: list[str] = []
    times = measured(program, [X], plans, progress=lambda done, total, what: said.append(what))
    assert [len(seconds) for seconds in times] == [2, 2]
    assert all(second > 0 for seconds in times for second in seconds)
    assert said == ["measuring 2 stages"] * 4
    assert set(seen) == {(False, False)}
    batches = {m: 8 + plan.batches_under_way for m, plan in zip((2, 4), plans, strict=True)}
    assert len(seen) == 2 * sum(m * count for m, count in batches.items())
    assert program.model.training


def test_the_model_is_left_alone() -> None:
    model = net()
    program = ps.capture(model, (X,))
    before = copy.deepcopy(model.state_dict())
    model[0].weight.grad = torch.ones(6, 6)
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    measured(program, [X], [uniform_plan(program, 2, 4)], rounds=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert model[3].weight.grad is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_the_fastest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(net(), (X,))
    seen: list[ps.Plan] = []

    def the_last_is_fastest(
        program: ps.Program, leaves: object, plans: list[ps.Plan], *_: object, **__: object
    ) -> list[list[float]]:
        seen.extend(plans)
        return [[float(len(plans) - k)] for k in range(len(plans))]

    monkeypatch.setattr("penstock.planning.planner.measured", the_last_is_fastest)
    chosen = plan_for(program, choices=[CPU], request=Request(), tune=True).plan
    assert len(seen) > 1
    assert chosen == seen[-1]
    kinds = {(plan.way, plan.schedule, plan.num_microbatches) for plan in seen}
    assert len(kinds) == len(seen)


def test_a_tuned_pipeline_trains() -> None:
    with ps.Pipeline(
        net(), (X,), devices=["cpu", "cpu"], num_microbatches=4, tune=True, replicas=1
    ) as pipe:
        loss = pipe.train_step(X, loss_fn=lambda output: output.square().mean())
    assert torch.isfinite(loss)


def test_without_weights_there_is_nothing_to_measure() -> None:
    with ps.empty_weights():
        model = net()
    program = ps.capture(model, (X,))
    with pytest.raises(ps.PlanError, match="cannot be measured on a model without weights"):
        measured(program, [X], [uniform_plan(program, 2, 4)])
