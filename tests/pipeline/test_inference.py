"""`Pipeline(inference=True)`: its cut, its memory, what it runs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.generation import planner
from penstock.plan.request import Request
from penstock.planning.planner import plan_for, profiles_for
from penstock.units import show_bytes
from tests.sessions.test_sessions import Memory, Recurrent, Remembering
from tests.support.models import mlp

CPU = torch.device("cpu")
X = torch.randn(6, 8)
KINDS: Any = ["threads", "processes"]
pytestmark = pytest.mark.usefixtures("pool")


def pipeline(model: nn.Module, x: torch.Tensor = X, **options: Any) -> ps.Pipeline:
    given: dict[str, Any] = {"devices": 2, "replicas": 1, "num_microbatches": 1, "progress": None}
    return ps.Pipeline(model, (x,), inference=True, **{**given, **options})


@pytest.mark.parametrize("stages", [2, 3])
def test_one_micro_batch_is_cut_where_the_busiest_stage_is_shortest(stages: int) -> None:
    """Of a model of unequal layers, by what was measured of it."""
    program = ps.capture(mlp(8, 400, 400, 16, 16, 600, 300, 8), (X,))
    request = Request(num_microbatches=1, replicas=1, inference=True)
    (costs,) = profiles_for(program, choices=[[CPU] * stages], request=request, seconds=1.0)
    found = ps.plan(costs, num_microbatches=1, replicas=1, inference=True)
    places = [k for k in range(1, costs.num_calls) if k not in costs.forbidden]
    every = [
        ps.plan(costs, num_microbatches=1, replicas=1, inference=True, cuts=cuts)
        for cuts in combinations(places, stages - 1)
    ]
    assert found.predicted_step_seconds == min(plan.predicted_step_seconds for plan in every)
    longest = [max(stage.forward_seconds for stage in plan.stages) for plan in every]
    assert max(stage.forward_seconds for stage in found.stages) <= min(longest) * 1.001


class Dropping(nn.Module):
    """Drops in a function, and has a module that says in which mode it was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).relu(), 0.5, self.training)
        return self.norm(x)


def test_forwards_alone_are_measured_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set()
    forward = nn.BatchNorm1d.forward

    def noting(self: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
        modes.add((self.training, torch.is_grad_enabled()))
        return forward(self, x)

    program = ps.capture(Dropping().train(), (X,))
    monkeypatch.setattr(nn.BatchNorm1d, "forward", noting)
    costs = ps.profile(program, devices=["cpu"], seconds=0.1, inference=True)
    assert modes == {(False, False)}
    assert program.model.training
    assert costs.inference
    assert not costs.saved
    assert not any(map(any, costs.on("cpu").backward))
    with pytest.raises(ps.InputError, match="the profile was measured for inference"):
        ps.plan(costs)
    assert not ps.profile(program, devices=["cpu"], seconds=0.1).inference


def test_models_without_weights_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.empty_weights():
        model = mlp(8, 16, 16, 8)
    costs = ps.profile(ps.capture(model, (X,)), devices=["cpu"], seconds=0.1, inference=True)
    assert not any(map(any, costs.on("cpu").backward))
    assert all(map(all, costs.on("cpu").forward))


# -- what it runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_gradients_runs(kind: Any) -> None:
    model = mlp(8, 16, 16, 8).eval()
    with torch.no_grad():
        wanted, short = model(X), model(X[:2])
    loss_fn: Any = F.mse_loss
    with pipeline(model, workers=kind, threads_per_worker=1) as pipe:
        assert pipe.plan.inference
        assert "inference" in repr(pipe)
        assert all(map(torch.equal, pipe.map([(X,), (X[:2],), (X,)]), [wanted, short, wanted]))
        with torch.no_grad():
            assert torch.equal(pipe(X), wanted)
            assert pipe.train_step(X, target=wanted, loss_fn=loss_fn) == 0
        assert pipe.eval_step(X, target=wanted, loss_fn=loss_fn) == 0
        assert all(p.grad is None for p in model.parameters())


def test_as_many_batches_are_under_way_as_keep_all_replicas_busy() -> None:
    """`map` has one batch more under way than replicas and stages need, and no more."""
    taken, given = [0], []

    def batches() -> Any:
        for _ in range(8):
            taken[0] += 1
            yield (X[:2],)

    options: Any = {"devices": 4, "replicas": 2, "num_microbatches": 2, "audit": None}
    with pipeline(mlp(8, 8, 8).eval(), X[:2], **options) as pipe:
        for _ in pipe.map(batches()):
            given.append(taken[0])
    assert given[0] == 1 + 4 // 2 + 1  # the next is taken before a result is given


REFUSED: dict[str, Callable[[ps.Pipeline], Any]] = {
    "train_step": lambda pipe: pipe.train_step(X, loss_fn=torch.sum),
    "train_microbatches": lambda pipe: pipe.train_microbatches([(X,)], loss_fn=torch.sum),
    "a call with gradients enabled": lambda pipe: pipe(X),
    "optimizer()": lambda pipe: pipe.optimizer(torch.optim.SGD, lr=0.1),
    "scaler()": lambda pipe: pipe.scaler(),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(1.0),
    "clip_grad_value_": lambda pipe: pipe.clip_grad_value_(1.0),
    "autosave()": lambda pipe: pipe.autosave("folder", every=1),
}


def test_what_needs_gradients_is_refused() -> None:
    with pipeline(mlp(8, 8, 8)) as pipe:
        for name, use in REFUSED.items():
            with pytest.raises(ps.InputError, match=r"the plan of this pipeline is for") as found:
                use(pipe)
            assert str(found.value).startswith(name)
            assert "without inference=True" in str(found.value)
        assert torch.equal(next(pipe.map([(X,)])), pipe.model(X))


def test_a_plan_that_is_given_is_for_inference_or_is_not() -> None:
    model = mlp(8, 8, 8)
    with pipeline(model) as pipe:
        plan = pipe.plan
    given: Any = {"devices": 2, "progress": None}
    with (
        ps.Pipeline(model, (X,), plan=plan, **given) as again,
        pytest.raises(ps.InputError, match="is for inference"),
    ):
        again.train_step(X, loss_fn=torch.sum)
    with ps.Pipeline(model, (X,), num_microbatches=1, replicas=1, **given) as trained:
        trained.train_step(X, loss_fn=torch.sum)
    with pytest.raises(ps.InputError, match="the plan that was given is for training"):
        pipeline(model, plan=trained.plan)
    with pipeline(model, tune=True) as tuned:
        assert tuned.plan.inference
    with pytest.raises(ps.InputError, match="has forwards only"):
        pipeline(model, schedule="1f1b")


def test_other_workers_are_for_inference_as_well() -> None:
    model = mlp(8, 8, 8, 8).eval()
    with pipeline(model) as first:
        plan = first.plan
    with ps.Pipeline(model, (X,), plan=plan, devices=2, progress=None) as pipe:
        assert pipe.resize(3, progress=None)
        assert (pipe.plan.inference, len(pipe.plan.devices)) == (True, 3)
        pipe.replan(progress=None)
        assert pipe.plan.inference
        assert torch.equal(next(pipe.map([(X,)])), model(X))


def test_replicas_and_one_device_are_compared_as_well() -> None:
    program = ps.capture(mlp(8, 64, 64, 8), (X,))
    choices, request = [[CPU], [CPU, CPU]], Request(inference=True)
    found = plan_for(program, choices=choices, request=request, seconds=1.0).plan
    kinds = {(c.way, c.replicas, c.stages) for c in found.considered}
    assert {("one device", 1, 1), ("pipeline", 1, 2), ("data parallel", 2, 1)} <= kinds


# -- states ---------------------------------------------------------------------------------------


def test_states_are_in_the_plan() -> None:
    """Those of an example as long as the longest texts."""
    plans = {}
    for length in (2, 200):
        with pipeline(Remembering().eval(), torch.randn(3, length, 4)) as pipe:
            plans[length] = pipe.plan
            states = [stage.state_bytes for stage in pipe.plan.stages]
        # Three layers, each with as many numbers as the input has, for three groups.
        assert sum(states) == 3 * 3 * (3 * length * 4 * 4)
        assert all(stage.memory_bytes > stage.state_bytes for stage in pipe.plan.stages)
        assert "states" in str(pipe.plan)
    limit = max(stage.memory_bytes for stage in plans[2].stages)
    with pipeline(Remembering().eval(), torch.randn(3, 2, 4), memory_limit=limit):
        pass
    with pytest.raises(ps.PlanError, match=r"no plan for inference fits .*states of 3 groups"):
        pipeline(Remembering().eval(), torch.randn(3, 200, 4), memory_limit=limit)


def test_sessions_hold_what_the_plan_says() -> None:
    """As many groups as planned, at the length of the example, hold the bytes of the plan."""
    x = torch.randn(3, 20, 4)
    for in_flight, count in ((None, 3), (5, 5)):
        options: Any = {"audit": None, "in_flight": in_flight}
        with pipeline(Remembering().eval(), x, **options) as pipe, torch.no_grad():
            kept = []
            for _ in range(count):
                memory = Memory()
                pipe.session()(x, memory)
                kept.append(memory)
            assert pipe._sessions.held() == planned(pipe)
            size = show_bytes(pipe.plan.stages[0].state_bytes)
            assert f"states of sessions: {size} of {size} planned with stage 0" in str(
                pipe.status()
            )
            kept.clear()
            del memory
            assert f"states of sessions: 0 B of {size} planned" in str(pipe.status())


def planned(pipe: ps.Pipeline) -> dict[int, int]:
    """Bytes of the states of every stage that has some."""
    stages = enumerate(pipe.plan.stages)
    return {k: stage.state_bytes for k, stage in stages if stage.state_bytes}


def test_states_that_are_named_are_in_the_plan_and_in_sessions() -> None:
    """A plain tuple, of which the example says nothing."""
    x = torch.randn(6, 4)
    model = Recurrent().eval()
    with pipeline(model, x) as pipe:
        assert not planned(pipe)
        unnamed = max(stage.memory_bytes for stage in pipe.plan.stages)
    options: Any = {"states": [1], "in_flight": 4, "audit": None}
    with pipeline(model, x, **options) as pipe, torch.no_grad():
        kept = [pipe.session()(x)[1] for _ in range(4)]
        assert all(isinstance(state, ps.Resident) for pair in kept for state in pair)
        assert pipe._sessions.held() == planned(pipe)
        assert sum(planned(pipe).values()) == 4 * 2 * 6 * 5 * 4  # groups, cells, rows, width, bytes
        assert not any(isinstance(s, ps.Resident) for s in pipe.session(states=())(x)[1])
    with pytest.raises(ps.PlanError, match=r"states of 4000 groups"):
        pipeline(model, x, states=[1], in_flight=4000, memory_limit=unnamed)
    with pytest.raises(ps.InputError, match=r"has no part 'hidden'; it has 0, 1"):
        pipeline(model, x, states=["hidden"])
    costs = ps.profile(ps.capture(model, (x,)), devices=["cpu"], seconds=0.1, states=[1])
    assert sum(costs.states) == pytest.approx(2 * 5 * 4)


def test_a_plan_that_was_given_has_room_for_as_many_groups_as_it_says() -> None:
    x = torch.randn(3, 20, 4)
    with pipeline(Remembering().eval(), x, in_flight=5) as pipe:
        plan = pipe.plan
    with pipeline(Remembering().eval(), x, plan=plan, in_flight=4) as again:
        assert again._sessions.most == 4
    with ps.Pipeline(Remembering().eval(), (x,), plan=plan, devices=2, progress=None) as again:
        assert again.resize(3, progress=None)
        assert again.plan.in_flight == 5
    with pytest.raises(ps.InputError, match="has room for the states of 5 groups"):
        pipeline(Remembering().eval(), x, plan=plan, in_flight=6)


def test_open_sessions_are_shared_evenly_by_replicas() -> None:
    x = torch.randn(4, 20, 4)
    options: Any = {"devices": 2, "replicas": 2, "num_microbatches": 2, "audit": None}
    with pipeline(Remembering().eval(), x, **options) as pipe:
        sessions = [pipe.session() for _ in range(4)]
        assert [session.replica for session in sessions] == [0, 1, 0, 1]
        del sessions[1], sessions[2]
        others = [pipe.session() for _ in range(2)]
        assert [session.replica for session in others] == [1, 1]


def test_the_benchmark_has_plans_of_any_number_of_micro_batches() -> None:
    planned = planner(mlp(8, 64, 64, 8), (X,), {})
    for count in (1, 2):
        found = planned(num_microbatches=count)
        assert (found.inference, found.num_microbatches, len(found.stages)) == (True, count, 2)
