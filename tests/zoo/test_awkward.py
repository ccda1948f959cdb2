"""Awkward models, cut everywhere: the plain model and a plain loop are the reference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.schedule import SCHEDULES
from tests.support.models import uniform_plan, workers_for
from tests.zoo.awkward import Zoo, outputs_loss
from tests.zoo.crossing import ZOO

ROWS, COUNT = 7, 3
NAMES = [kind.__name__ for kind in ZOO]


@cache
def captured(name: str) -> tuple[ps.Program, dict[str, Any]]:
    """A program of the model, and the model's initial state."""
    torch.manual_seed(4)
    model = {kind.__name__: kind for kind in ZOO}[name]()
    program = ps.capture(model, *model.inputs(5))
    return program, copy.deepcopy(model.state_dict())


def fresh(name: str) -> ps.Program:
    """The program, its model as it was at first."""
    program, state = captured(name)
    program.model.load_state_dict(state)
    program.model.zero_grad()
    return program


def inputs(program: ps.Program, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(program.model, Zoo)
    torch.manual_seed(rows)
    return program.model.inputs(rows)


def assert_same(ours: Any, theirs: Any) -> None:
    """Both are the same containers with the same tensors and constants."""
    (left, one), (right, other) = (_pytree.tree_flatten(_open(tree)) for tree in (ours, theirs))
    assert one == other
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _open(tree: Any) -> Any:
    """Dataclasses as dictionaries: pytree does not look into them."""
    if hasattr(tree, "__dataclass_fields__"):
        return {type(tree).__name__: {k: _open(v) for k, v in vars(tree).items()}}
    return tree


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_replays_and_differentiates_like_the_model(name: str, training: bool) -> None:
    program = fresh(name)
    frozen = [m for m in program.model.modules() if not m.training]
    twin = copy.deepcopy(program.model)
    if not training:
        program.model.eval()
        twin.eval()
    try:
        for rows in (2, 3, 6, 11):
            args, kwargs = inputs(program, rows)
            ours = program(*copy.deepcopy(args), **kwargs)
            theirs = twin(*args, **kwargs)
            assert_same(ours, theirs)
            outputs_loss(ours).backward()
            outputs_loss(theirs).backward()
            assert_same(gradients(program.model), gradients(twin))
            assert_same(program.model.state_dict(), twin.state_dict())
    finally:
        program.model.train()
        for module in frozen:
            module.training = False


def plain_step(model: nn.Module, args: Any, kwargs: Any, count: int) -> torch.Tensor:
    """The batch's loss, its gradients accumulated micro-batch by micro-batch."""
    total: Any = 0.0
    for index in range(count):

        def part(leaf: Any, index: int = index) -> Any:
            return leaf.tensor_split(count)[index] if isinstance(leaf, torch.Tensor) else leaf

        some_args, some_kwargs = _pytree.tree_map(part, (args, kwargs))
        tensors = (x for x in _pytree.tree_leaves(some_args) if isinstance(x, torch.Tensor))
        rows = len(next(tensors))
        loss = outputs_loss(model(*some_args, **some_kwargs)) * (rows / ROWS)
        loss.backward()
        total = total + loss.detach()
    return total


def positions(program: ps.Program) -> Iterator[tuple[int, ...]]:
    """Every single cut, and some sets of two and three."""
    allowed = [k for k in range(1, len(program)) if program.cuts.forbidden(k) is None]
    assert allowed
    yield from ((k,) for k in allowed)
    for size in (2, 3):
        yield from list(itertools.combinations(allowed, size))[:: 1 + len(allowed) ** size // 12]


@pytest.mark.parametrize("name", NAMES)
def test_trains_like_a_plain_loop_wherever_it_is_cut(name: str) -> None:
    ways = itertools.cycle(itertools.product(SCHEDULES, ("none", "boundaries", "all")))
    for cuts in positions(captured(name)[0]):
        program = fresh(name)
        twin = copy.deepcopy(program.model)
        args, kwargs = inputs(program, ROWS)
        found = ((workers_for(s, len(cuts) + 1), s, r) for s, r in ways)
        workers, schedule, recompute = next(way for way in found if way[0])
        plan = uniform_plan(program, workers or 1, COUNT, schedule, cuts, recompute)
        with ps.Pipeline(program.model, plan=plan, program=program, devices=plan.devices) as pipe:
            for _ in range(2):
                loss = pipe.train_step(*copy.deepcopy(args), loss_fn=outputs_loss, **kwargs)
                expected = run_with_threads(
                    lambda twin=twin, args=args, kwargs=kwargs: plain_step(
                        twin, args, kwargs, COUNT
                    ),
                    1,
                )
                assert torch.equal(loss, expected), f"{cuts}, {schedule}, recompute {recompute}"
                assert_same(gradients(pipe.model), gradients(twin))
                assert_same(pipe.state_dict(), twin.state_dict())
