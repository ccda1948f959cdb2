"""One stage between a source and a sink made for the test: no links, no workers, no capture."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from penstock.board.activity import code
from penstock.board.phases import phases_of
from penstock.capture import Key
from penstock.engine.compile import compile_actions
from penstock.engine.span import MicroBatch, Span
from penstock.engine.stage import Stage
from penstock.links.link import Gradients, Roots, Values, edges
from penstock.schedule import Action, Kind

KEY = Key(0, 0, 0)


class Neighbour:
    """A source that gives what it was told to, or a sink that remembers what it got."""

    def __init__(self, given: Values = ()) -> None:
        self.given = given
        self.got: list[Any] = []

    def receive(self, microbatch: int) -> Values:
        return self.given

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        self.got.append(list(gradients))

    def send(self, microbatch: int, results: Values) -> Roots:
        self.got.append([r.detach().clone() for r in results])
        return edges(results)

    def receive_gradients(self, microbatch: int) -> Gradients:
        return self.given


def stage_of(
    function: Any, values: Values, gradients: Gradients = (), recompute: bool = False
) -> Stage:
    def module(rows: int, key: Key | None, *entered: torch.Tensor) -> Values:
        results = function(*entered)
        return results if isinstance(results, tuple) else (results,)

    stage = Stage(0, [[Span(module, recompute)]], Neighbour(values), Neighbour(tuple(gradients)))
    stage.microbatches = [MicroBatch({"B": 2}, KEY)] * 4
    return stage


def step(stage: Stage, microbatch: int = 0) -> list[torch.Tensor | None]:
    """Forward and backward of a micro-batch; the gradients that went back."""
    stage.await_values(microbatch)
    stage.forward(microbatch)
    stage.await_gradients(microbatch)
    stage.backward(microbatch)
    found: list[torch.Tensor | None] = stage.source.got[-1]  # type: ignore[attr-defined]
    return found


def test_gradients_go_back_and_into_parameters() -> None:
    layer, x, gradient = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    (found,) = step(stage_of(layer, (x,), (gradient,)))
    own = layer.weight.grad
    layer.weight.grad = None
    layer(x).backward(gradient)
    assert own is not None
    assert torch.equal(own, layer.weight.grad)
    assert torch.equal(found, x.grad)


def test_the_senders_gradient_is_not_written() -> None:
    """The values belong to another stage: nothing may be left in their `.grad`."""
    x = torch.randn(2, 3, requires_grad=True)
    step(stage_of(lambda v: v * 2, (x,), (torch.ones(2, 3),)))
    assert x.grad is None


@pytest.mark.parametrize("first", [torch.relu_, lambda v: v.mul_(2), nn.ReLU(inplace=True)])
def test_a_stage_may_begin_in_place(first: Any) -> None:
    x = torch.randn(2, 3).requires_grad_() * 1.0
    expected = x.detach().clone().requires_grad_()
    first(expected * 1.0).backward(torch.ones(2, 3))
    (found,) = step(stage_of(first, (x,), (torch.ones(2, 3),)))
    assert torch.equal(found, expected.grad)


def test_changing_what_the_sender_still_needs_is_an_error() -> None:
    """As it is in one device's graph: the versions are shared."""
    y = torch.randn(2, 3, requires_grad=True).exp()  # its backward reads its own result
    step(stage_of(lambda v: v.mul_(2), (y,), (torch.ones(2, 3),)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_integers_and_what_is_frozen_pass_without_gradients() -> None:
    ids, x = torch.tensor([0, 1]), torch.randn(2, 3)
    table = nn.Embedding(2, 3)
    found = step(stage_of(lambda i, v: (table(i) + v, i), (ids, x), (torch.ones(2, 3), None)))
    assert found == [None, None]
    assert table.weight.grad is not None


def test_results_that_nobody_differentiates_run_no_backward() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    assert step(stage_of(layer, (x,), (None,))) == [None]
    assert layer.weight.grad is None


def test_nothing_is_held_longer_than_needed() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    stage = stage_of(lambda v: v + 1, (x,), (torch.ones(2, 3),))
    seen: list[Any] = []
    (span,) = stage.ways[0]
    module = span.module

    def watched(*args: Any) -> Values:
        results = module(*args)
        seen.extend(weakref.ref(t) for t in (args[2], results[0]))
        return results

    span.module = watched
    stage.await_values(0)
    stage.forward(0)
    gc.collect()
    assert [ref() for ref in seen] == [None, None]  # an addition needs neither for its backward
    assert list(stage.held) == [0]
    stage.await_gradients(0)
    stage.backward(0)
    assert stage.held == {}
    assert stage._arrived == ()


def test_inference_holds_nothing() -> None:
    stage = stage_of(nn.Linear(3, 3), (torch.randn(2, 3),))
    stage.await_values(0)
    with torch.no_grad():
        stage.infer(0)
    assert stage.held == {}
    assert len(stage.sink.got) == 1  # type: ignore[attr-defined]


def test_an_action_becomes_a_wait_and_a_work() -> None:
    stage = stage_of(lambda v: v * 2, (torch.ones(2, 3, requires_grad=True),), (torch.ones(2, 3),))
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0)]
    runs = compile_actions(actions, [stage], train=True)
    assert len(runs) == 6
    for run in runs:
        run()
    assert list(stage.held) == [1]


def test_parts_of_actions_are_noted() -> None:
    values, gradients = (torch.ones(2, 3, requires_grad=True),), (torch.ones(2, 3),)
    stage = stage_of(lambda v: v * 2, values, gradients, recompute=True)
    stage.record.log = []
    for action in (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)):
        for waits, run in zip((True, False), compile_actions([action], [stage], True), strict=True):
            stage.record.note(code(action, waits))
            run()
    stage.record.note(0)
    found = [(phase.what, str(phase.action)) for phase in phases_of(5, stage.record.log)]
    assert found == [
        *[(what, "F0.0") for what in ("wait", "forward", "send", "forward")],
        *[(what, "B0.0") for what in ("wait", "backward", "recomputation", "backward", "send")],
        ("backward", "B0.0"),
    ]
