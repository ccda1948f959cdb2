"""How long is measured before a plan is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.plan.request import Request
from penstock.planning import planner
from penstock.workers.processes.backend import ProcessBackend
from penstock.workers.ranks.backend import RankBackend
from penstock.workers.threads.backend import ThreadBackend
from tests.support.models import mlp

CPU = torch.device("cpu")
X = torch.randn(4, 8)


def test_a_pipeline_measures_for_seconds_and_takes_what_was_measured_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, float, float]] = []
    measured = planner.cached_profiles

    def note(*args: Any, choices: Any, seconds: float, longer: float, **options: Any) -> Any:
        asked.append((len(choices), seconds, longer))
        return measured(*args, choices=choices, seconds=0.0, longer=0.0, **options)

    monkeypatch.setattr(planner, "cached_profiles", note)
    model = mlp(8, 8, 8)
    ps.Pipeline(model, (X,), devices=["cpu", "cpu"]).close()
    assert asked.pop() == (1, planner.PROMPT, planner.SECONDS)
    assert planner.PROMPT < planner.SECONDS
    program = ps.capture(model, (X,))
    planner.plan_for(program, choices=[[CPU]], request=Request())
    assert asked.pop() == (1, planner.SECONDS, planner.SECONDS)
    planner.plan_for(program, choices=[[CPU], [CPU, CPU]], request=Request(), seconds=2.0)
    both = planner.TOGETHER / 2
    assert asked == [(2, both * 2.0, both * planner.SECONDS)]


def test_what_workers_of_each_kind_allow_and_need() -> None:
    threads = planner.limits_of(ThreadBackend(["cpu", "cpu"]))
    assert (threads.in_one_memory, threads.in_one_process) == (True, True)
    assert threads.sums(["cpu", "cpu"]) == "shared"
    assert threads.sums(["cuda:0", "cuda:1"]) == "gathered"
    assert not threads.copies_gradients
    assert ProcessBackend.copies_gradients
    assert not RankBackend.in_one_memory
