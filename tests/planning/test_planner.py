"""How long is measured before a plan is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

import penstock as ps
from penstock.plan import Plan
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
    assert asked.pop(0) == (2, both * 2.0, both * planner.SECONDS)
    assert [count for count, _, _ in asked] in ([], [2])  # whether one thread does


def test_one_thread_is_measured_where_a_single_worker_has_short_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[int]] = []
    costs: list[float] = []
    measured = planner.cached_profiles

    def note(*args: Any, choices: Any, **options: Any) -> Any:
        asked.append([threads for _, threads in choices])
        found, cached = measured(*args, choices=choices, **options)
        slower = {1: 1.0, 2: 0.4}  # two threads help
        return [_times(own, slower[own.threads] * costs[-1]) for own in found], cached

    model = mlp(8, 8, 8)
    program = ps.capture(model, (X,))
    monkeypatch.setattr(planner, "cached_profiles", note)
    monkeypatch.setattr(planner, "threads_per_worker", lambda devices: 2 // len(devices))

    def plan(choices: Any, **options: Any) -> Plan:
        asked.clear()
        given: dict[str, Any] = {"choices": choices, "request": Request(), "seconds": 0.0}
        return planner.plan_for(program, **given, **options).plan

    both = [[CPU], [CPU, CPU]]
    for cost, threads, profiles in (
        (1e-4, 2, [[2, 1], [2, 1]]),
        (1.0, 2, [[2, 1]]),  # a step of seconds: nobody asks
    ):
        costs.append(cost)
        found = plan(both)
        assert (len(found.devices), found.threads, asked) == (1, threads, profiles)
    assert plan([[CPU]]).threads == 2  # the user has asked for this worker
    assert asked == [[2]]
    plan(both, threads=2)
    assert asked == [[2, 2]]


def _times(profile: ps.Profile, seconds: float) -> ps.Profile:
    """The profile, in which every call takes so long for any number of rows and of workers."""
    kinds = {
        name: replace(
            kind,
            forward=tuple(tuple(seconds for _ in line) for line in kind.forward),
            backward=tuple(tuple(2 * seconds for _ in line) for line in kind.backward),
            contention=(),
        )
        for name, kind in profile.kinds.items()
    }
    return replace(profile, kinds=kinds)


def test_what_workers_of_each_kind_allow_and_need() -> None:
    threads = planner.limits_of(ThreadBackend(["cpu", "cpu"]))
    assert (threads.in_one_memory, threads.in_one_process) == (True, True)
    assert threads.sums(["cpu", "cpu"]) == "shared"
    assert threads.sums(["cuda:0", "cuda:1"]) == "gathered"
    assert not threads.copies_gradients
    assert ProcessBackend.copies_gradients
    assert not RankBackend.in_one_memory
