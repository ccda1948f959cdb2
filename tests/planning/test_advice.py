"""Who would be better off without a pipeline is told so when it is built."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch

import penstock as ps
from penstock.plan.text import advice
from penstock.planning import planner as planning
from tests.support.models import mlp, uniform_plan

X = torch.randn(8, 6)


@pytest.fixture
def plan() -> ps.Plan:
    return uniform_plan(ps.capture(mlp(6, 6, 6), (X,)), 2, 2)


def test_a_plan_that_wins_needs_no_advice(plan: ps.Plan) -> None:
    slow = msgspec.structs.replace(plan, one_device_seconds=1e3, data_parallel_seconds=1e3)
    assert advice(slow) == []


@pytest.mark.parametrize(
    ("alone", "copies", "words"),
    [
        (1e-3, 1.0, "One device alone is predicted to be faster"),
        (1.0, 1e-3, "Data parallelism is predicted to be faster"),
    ],
)
def test_something_else_wins(plan: ps.Plan, alone: float, copies: float, words: str) -> None:
    other = msgspec.structs.replace(plan, one_device_seconds=alone, data_parallel_seconds=copies)
    (found,) = advice(other)
    assert found.startswith(words)
    assert "The pipeline is predicted to take" in found


def test_a_worker_that_is_hardly_needed(plan: ps.Plan) -> None:
    first, *others = plan.stages
    small = [
        msgspec.structs.replace(s, forward_seconds=1e-6, backward_seconds=1e-6) for s in others
    ]
    slow = {"one_device_seconds": 1e3, "data_parallel_seconds": 1e3}
    found = advice(msgspec.structs.replace(plan, stages=(first, *small), **slow))
    assert [text.split(" of a step")[0] for text in found] == [
        "Worker 1 is predicted to work for 0%"
    ]


def test_it_is_told_at_building_and_not_of_a_plan_that_was_given(
    plan: ps.Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast = msgspec.structs.replace(plan, one_device_seconds=1e-3, data_parallel_seconds=None)
    monkeypatch.setattr(planning, "plan_for", lambda *_, **options: planning.Planned(fast, None))
    with caplog.at_level(logging.WARNING, "penstock"):
        ps.Pipeline(mlp(6, 6, 6), (X,), devices=2, plan=fast).close()
        assert not caplog.records
        ps.Pipeline(mlp(6, 6, 6), (X,), devices=2, replicas=1).close()
    (record,) = caplog.records
    assert record.message.startswith("One device alone is predicted to be faster")
