"""Recomputing: the same bits, nothing held but what enters, buffers updated once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture import Key
from penstock.engine.span import MicroBatch, Span
from penstock.engine.stage import Stage
from tests.engine.test_stage import Neighbour

ROWS = 6


class Net(nn.Module):
    """BatchNorm, dropout, an operation in place, a skip over everything, a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first(x) * self.scale
        hidden = self.drop(self.relu(self.norm(start)))
        hidden = self.second(hidden) * self.scale
        hidden += start
        return hidden


def run(spans: list[int], recompute: list[bool]) -> tuple[dict[str, Any], list[Any]]:
    """Two micro-batches through one stage that is cut so; its model's state and gradients."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, 2, 5, 5)
    program = ps.capture(model, (x,))
    parts = program.stages(spans, training=True)
    changing = list(model.buffers())
    stage = Stage(
        0,
        [
            [
                Span(p.module, r, changing, p.overwritten)
                for p, r in zip(parts, recompute, strict=True)
            ]
        ],
        Neighbour((x.clone().requires_grad_(),)),
        Neighbour((torch.randn(ROWS, 4, 5, 5),)),
    )
    stage.microbatches = [MicroBatch({"B": ROWS}, Key(0, 1, i)) for i in range(2)]
    for i in range(2):
        stage.await_values(i)
        stage.forward(i)
    for i in range(2):
        stage.await_gradients(i)
        stage.backward(i)
    state = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
    got: list[Any] = [g for gs in stage.source.got for g in gs]  # type: ignore[attr-defined]
    return copy.deepcopy(state), got + stage.sink.got  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spans", "recompute"),
    [
        ([], [True]),
        ([3], [True, False]),
        ([3], [False, True]),
        ([2, 4], [True, False, True]),
        ([2, 4], [True, True, True]),
        ([3], [False, False]),
        ([8], [False, True]),  # begins with the sum in place
        ([5, 8], [True, True, False]),
    ],
)
def test_the_bits_are_those_without(spans: list[int], recompute: list[bool]) -> None:
    expected, sent = run([], [False])
    found, also_sent = run(spans, recompute)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for ours, theirs in zip(also_sent, sent, strict=True):
        for a, b in zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]:
            assert torch.equal(a, b)


def test_only_what_enters_is_held() -> None:
    held: list[int] = []
    kept: list[torch.Tensor] = []

    def count(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    def module(sizes: Any, key: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(5):
            x = x.sin()
        return (x,)

    x = torch.randn(1000, requires_grad=True)
    for recompute in (False, True):
        stage = Stage(0, [[Span(module, recompute)]], Neighbour((x,)), Neighbour((x.detach(),)))
        stage.microbatches = [MicroBatch({"B": 1}, Key(0, 0, 0))]
        stage.await_values(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            stage.forward(0)
        held.append(len(kept))
        kept.clear()
    assert held == [5, 0]


def test_autocast_is_as_it_was() -> None:
    """The backward of `pipe(x)` may run when the user has left the region."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)

    def module(sizes: Any, key: Any, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (layer(x),)

    grads = []
    for recompute in (False, True):
        layer.zero_grad()
        x = torch.ones(2, 8, requires_grad=True)
        gradient = torch.ones(2, 8, dtype=torch.bfloat16)
        stage = Stage(0, [[Span(module, recompute)]], Neighbour((x,)), Neighbour((gradient,)))
        stage.microbatches = [MicroBatch({"B": 1}, Key(0, 0, 0))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stage.await_values(0)
            stage.forward(0)
        stage.await_gradients(0)
        stage.backward(0)
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
