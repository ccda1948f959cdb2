"""Models drawn at random: aliases, changes in place, shared layers and buffers, cut anywhere.

They run on one replica or on several, whose stages in threads now and then take their time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.schedule import SCHEDULES
from tests.support.delays import slow_stages
from tests.support.models import replicated, uniform_plan, workers_for

WIDTH, ROWS = 4, 7
Step = tuple[str, int, int]
Pool = list[torch.Tensor]


class Drawn(nn.Module):
    """Runs a list of steps, each of which adds a value to a pool or changes one in place."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pool = [x, self.layers[0](x)]
        for name, i, j in self.steps:
            made = STEPS[name](self, pool[i % len(pool)], pool[j % len(pool)])
            if made is not None:
                pool.append(made)
        return tuple(pool[-2:])


def inner(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
    """A step that gives no value: it changes its first one."""

    def step(model: Drawn, a: torch.Tensor, b: torch.Tensor) -> None:
        function(a, b)

    return step


def remember(model: Drawn, a: torch.Tensor, b: torch.Tensor) -> None:
    model.average.lerp_(a.detach().mean(0), 0.5)


STEPS: dict[str, Callable[[Drawn, torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "first layer": lambda m, a, b: m.layers[0](a),
    "second layer": lambda m, a, b: m.layers[1](a),
    "norm": lambda m, a, b: m.norm(a),
    "add": lambda m, a, b: a + b,
    "multiply": lambda m, a, b: a * b,
    "scale": lambda m, a, b: a * m.scale,
    "tanh": lambda m, a, b: a.tanh(),
    "alias": lambda m, a, b: a.view_as(a),
    "swap": lambda m, a, b: torch.cat(a.chunk(2, 1)[::-1], 1),
    "columns first": lambda m, a, b: a.T.contiguous().T,
    "detach": lambda m, a, b: a.detach(),
    "subtract average": lambda m, a, b: a - m.average,
    "remember": remember,
    "relu_": inner(lambda a, b: a.relu_()),
    "add_": inner(lambda a, b: a.add_(b)),
    "column_": inner(lambda a, b: a[:, 0].mul_(0.5)),
    "set_": inner(lambda a, b: a.__setitem__((slice(None), 1), b[:, 2])),
}


def loss_of(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([value.square().mean() for value in output]).sum()


def plain_step(model: nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    total: Any = 0.0
    for part in x.tensor_split(count):
        share = len(part) / len(x)
        loss = loss_of(model(part))
        (loss * share).backward()
        total = total + loss.detach() * share
    return total


def plain_steps(model: nn.Module, x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Two steps; what a forward writes into the batch is there in the second, without a graph."""
    return [plain_step(model, batch, count) for batch in (x, x.detach())]


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b), name


steps = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9))


def check(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Drawn(data.draw(st.lists(steps, min_size=2, max_size=9)))
    count = data.draw(st.sampled_from([1, 2, 3]))
    replicas = data.draw(st.integers(1, count))
    x = torch.randn(ROWS, WIDTH)
    theirs, batch = copy.deepcopy(model), x.clone()
    try:  # torch itself refuses some changes in place
        expected = run_with_threads(lambda: plain_steps(theirs, batch, count), 1)
    except RuntimeError:
        assume(False)

    program = ps.capture(model, (x,))
    allowed = [k for k in range(1, len(program)) if program.cuts.forbidden(k) is None]
    event(f"closed: {sorted(program.closed.values())}")
    cuts = sorted(data.draw(st.sets(st.sampled_from(allowed or [1]), min_size=1, max_size=3)))
    assume(allowed)
    stages = len(cuts) + 1
    fitting = [
        name
        for name, recipe in SCHEDULES.items()
        if workers_for(name, stages) and (replicas == 1 or not recipe.splits_backward)
    ]
    schedule = data.draw(st.sampled_from(fitting))
    recompute = data.draw(st.sampled_from(["none", "boundaries", "all"]))
    if replicas > 1 and program.train.changed:
        recompute = "none"  # replicas do not recompute what changes buffers
    workers = workers_for(schedule, stages) or 1
    plan = replicated(uniform_plan(program, workers, count, schedule, cuts, recompute), replicas)
    event(f"replicas: {replicas}")
    with (
        slow_stages(seed=0) if replicas > 1 else nullcontext(),
        ps.Pipeline(model, plan=plan, program=program, devices=plan.devices) as pipe,
    ):
        batch = x.clone()
        assert [pipe.train_step(batch, loss_fn=loss_of) for _ in "12"] == expected
        assert_same(model, theirs)


def test_a_view_of_memory_that_is_changed_later_does_not_cross() -> None:
    """Its gradient has another layout in plain PyTorch, so that a bias adds it up otherwise."""
    steps = [("columns first", 1, 0), ("detach", 2, 0), ("column_", 3, 0), ("add", 0, 2)]
    torch.manual_seed(0)
    model = Drawn(steps)
    x = torch.randn(ROWS, WIDTH)
    theirs = copy.deepcopy(model)
    run_with_threads(lambda: plain_step(theirs, x.clone(), 1), 1)
    program = ps.capture(model, (x,))
    forbidden = {k: program.cuts.forbidden(k) for k in range(1, len(program))}
    assert "is a view of memory that is changed later" in str(forbidden)
    for cut in (k for k, reason in forbidden.items() if reason is None):
        model.zero_grad()
        plan = uniform_plan(program, 2, 1, "1f1b", (cut,))
        with ps.Pipeline(model, plan=plan, program=program, devices=plan.devices) as pipe:
            pipe.train_step(x.clone(), loss_fn=loss_of)
        assert_same(model, theirs)


def test_what_a_forward_writes_into_the_batch_has_no_graph_in_the_next_step() -> None:
    steps = [("add", 0, 0)] * 2 + [("scale", 2, 0), ("add", 0, 0), ("add_", 0, 4), ("scale", 2, 0)]
    torch.manual_seed(0)
    model = Drawn(steps)
    x = torch.randn(ROWS, WIDTH)
    theirs, batch = copy.deepcopy(model), x.clone()
    expected = run_with_threads(lambda: plain_steps(theirs, batch, 1), 1)
    program = ps.capture(model, (x,))
    plan = uniform_plan(program, 2, 1, "naive", (1,))
    with ps.Pipeline(model, plan=plan, program=program, devices=plan.devices) as pipe:
        written = x.clone()
        assert [pipe.train_step(written, loss_fn=loss_of) for _ in "12"] == expected
    assert_same(model, theirs)
    assert torch.equal(written, batch)
    assert not written.requires_grad


@settings(max_examples=25)
@given(st.data())
def test_a_model_drawn_at_random(data: st.DataObject) -> None:
    check(data)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.data())
def test_many_models_drawn_at_random(data: st.DataObject) -> None:
    check(data)
