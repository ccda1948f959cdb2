"""What random numbers depend on: evaluation moves none of it, and all of it can be saved."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.checkpoint.contents import generators_now
from tests.support.models import uniform_plan

X, Y = torch.randn(7, 6), torch.randn(7, 6)
KINDS = pytest.mark.parametrize("workers", ["threads", "processes"])


pytestmark = pytest.mark.usefixtures("pool")


def make(workers: str = "threads", stages: int = 2) -> ps.Pipeline:
    """A pipeline of a model with dropout in every layer."""
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(4)))
    program = ps.capture(model, (X,))
    options: dict[str, Any] = {"program": program, "plan": uniform_plan(program, stages, 3)}
    return ps.Pipeline(
        model, (X,), devices=["cpu"] * stages, workers=workers, **options, replicas=1
    )


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def plain(pipe: ps.Pipeline) -> torch.Tensor:
    loss = F.mse_loss(pipe(X), Y)
    loss.backward()
    return loss.detach()


def drawing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * torch.rand_like(output)).square().mean()


def evaluated(pipe: ps.Pipeline) -> None:
    with torch.no_grad():
        pipe.eval()(X)
        pipe.train()


def evaluated_with_gradients(pipe: ps.Pipeline) -> None:
    pipe.eval()(X)
    pipe.train()


def a_call_in_training_mode(pipe: ps.Pipeline) -> None:
    with torch.no_grad():
        pipe(X)


def in_inference_mode(pipe: ps.Pipeline) -> None:
    with torch.inference_mode():
        pipe(X)


def mapped(pipe: ps.Pipeline) -> None:
    for _ in pipe.map([X, X, X]):
        pass


def a_step_without_gradients(pipe: ps.Pipeline) -> None:
    with torch.no_grad():
        step(pipe)


BETWEEN = [
    *(evaluated, evaluated_with_gradients, a_call_in_training_mode, in_inference_mode, mapped),
    a_step_without_gradients,
]


def run(pipe: ps.Pipeline, between: Callable[[ps.Pipeline], None] | None) -> list[torch.Tensor]:
    losses = []
    for one in (step, plain, step):
        losses.append(one(pipe))
        if between is not None:
            between(pipe)
    return [*losses, *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_what_is_evaluated_in_between_changes_no_training(
    between: Callable[[ps.Pipeline], None],
) -> None:
    with make() as alone, make() as watched:
        assert same(run(watched, between), run(alone, None))


def test_masks_differ_from_call_to_call() -> None:
    """Whether a call trains or not: dropout at evaluation samples the model."""
    with make() as pipe:
        with torch.no_grad():
            samples = [pipe(X) for _ in range(3)]
        samples += [pipe(X).detach() for _ in range(3)]
        assert len({tuple(sample.flatten().tolist()) for sample in samples}) == 6


def test_training_in_evaluation_mode_counts() -> None:
    """As models are trained whose dropout is off; the loss may draw all the same."""
    with make() as alone, make() as watched:
        losses: dict[ps.Pipeline, list[torch.Tensor]] = {alone: [], watched: []}
        for pipe, found in losses.items():
            pipe.eval()
            for _ in range(3):
                found.append(pipe.train_step(X, target=Y, loss_fn=drawing_loss))
                if pipe is watched:
                    evaluated(pipe)
                    pipe.eval()
        assert same(losses[watched], losses[alone])
        assert len(set(map(float, losses[alone]))) == 3


@KINDS
def test_a_state_goes_on_elsewhere(workers: str) -> None:
    """In other workers, on another number of stages, in a process that was seeded otherwise."""
    with make() as first:
        step(first)
        a_call_in_training_mode(first)
        state = json.loads(json.dumps(first.random_state()))
        weights = copy.deepcopy(first.state_dict())
        first.zero_grad()
        expected = run(first, a_call_in_training_mode)
    with make(workers, stages=1 if workers == "threads" else 2) as second:
        torch.manual_seed(12345)
        step(second)
        second.zero_grad()
        second.load_state_dict(weights)
        before = torch.get_rng_state()
        second.load_random_state(state)
        assert second.random_state() == state
        assert torch.equal(torch.get_rng_state(), before)
        assert same(run(second, a_call_in_training_mode), expected)
        second.zero_grad()
        second.load_random_state({**state, "trained": state["trained"] + 1})
        assert not same(run(second, None), expected)
        torch.manual_seed(99)
        assert second.random_state()["seed"] == 99


def test_what_is_no_state_is_refused() -> None:
    with make() as pipe:
        for wrong in (None, 3, {}, {"trained": 1.5}, {"seed": 3}):
            with pytest.raises(ps.InputError, match="is not a state of random numbers"):
                pipe.load_random_state(wrong)  # type: ignore[arg-type]
        assert pipe.random_state()["trained"] == 0


@KINDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(workers: str, mode: Callable[[], Any]) -> None:
    """The loss is that of the plain model, and no gradient is touched."""
    with make(workers) as pipe:
        twin = copy.deepcopy(pipe.model)
        step(pipe)
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        pipe.eval()
        twin.eval()
        scale = torch.ones((), requires_grad=True)
        with mode():
            found = pipe.train_step(
                X,
                target=Y,
                loss_fn=lambda output, target: F.mse_loss(output, target) * scale,
                metrics=lambda output, target: len(output),
                outputs=True,
            )
            alone = pipe.train_microbatches([X[:3], X[3:]], targets=[Y[:3], Y[3:]],
                                            loss_fn=F.mse_loss)  # fmt: skip
            parts = [twin(part) for part in X.tensor_split(3)]
            each = [F.mse_loss(a, b) for a, b in zip(parts, Y.tensor_split(3), strict=True)]
            loss = each[0] * (3 / 7) + each[1] * (2 / 7) + each[2] * (2 / 7)
        assert torch.equal(found.loss, loss)
        assert torch.equal(found.outputs, torch.cat(parts))
        assert found.metrics == [3, 2, 2]
        assert not alone.requires_grad
        assert not found.loss.requires_grad
        assert same([p.grad for p in pipe.parameters() if p.grad is not None], before)


class Backwards(nn.Module):
    """Gives its rows the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)


@pytest.mark.filterwarnings("ignore::penstock.RowsWarning")
def test_a_call_that_is_refused_does_not_count() -> None:
    """Its result cannot be put together, which is known before anything runs."""
    found = []
    for refused in (False, True):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), Backwards())
        program = ps.capture(model, (X,))
        options: dict[str, Any] = {"program": program, "plan": uniform_plan(program, 2, 3)}
        with ps.Pipeline(model, (X,), devices=["cpu"] * 2, **options, replicas=1) as pipe:
            if refused:
                with pytest.raises(ps.InputError, match="cannot be put together"):
                    pipe(X)
            found.append(pipe.train_step(X, loss_fn=lambda out: out.square().mean()))
    assert torch.equal(*found)


class Noisy(nn.Module):
    """Takes its time while it draws, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Noise.apply(self.linear(x))


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        drawn = x + torch.rand_like(x)
        time.sleep(0.005)
        return drawn

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def noisy() -> ps.Pipeline:
    torch.manual_seed(4)
    model = nn.Sequential(Noisy(), Noisy())
    program = ps.capture(model, (X,), keep_closed=["0", "1"])
    plan = uniform_plan(program, 2, 3)
    return ps.Pipeline(model, (X,), devices=["cpu"] * 2, program=program, plan=plan, audit=None)


def test_map_and_a_script_that_draws_between_its_results() -> None:
    """Neither sees the other's numbers, though both draw from the same generator."""
    count = 6
    with noisy() as pipe, torch.no_grad():
        torch.manual_seed(5)
        batches = [torch.rand(7, 6) for _ in range(count)]
        drawn = [torch.rand(3) for _ in range(count)]
        state = pipe.random_state()
        expected = [pipe(batch) for batch in batches]
        pipe.load_random_state(state)
        torch.manual_seed(5)
        taken = (torch.rand(7, 6) for _ in range(count))
        assert all(map(torch.equal, pipe.map(taken, ahead=3), expected))
        pipe.load_random_state(state)
        torch.manual_seed(5)
        assert all(torch.equal(torch.rand(7, 6), batch) for batch in batches)
        seen = [(out, torch.rand(3)) for out in pipe.map(batches, ahead=3)]
        assert all(torch.equal(out, right) for (out, _), right in zip(seen, expected, strict=True))
        assert all(torch.equal(own, right) for (_, own), right in zip(seen, drawn, strict=True))


def test_two_pipelines_that_draw_in_two_threads() -> None:
    def run(pipe: ps.Pipeline) -> list[torch.Tensor]:
        pipe.load_random_state({"seed": 7, "trained": 0, "others": 0})
        with torch.no_grad():
            return [pipe(X) for _ in range(10)]

    def states(pipe: ps.Pipeline) -> tuple[int, torch.Tensor]:
        return pipe.random_state()["seed"], generators_now()["torch"]

    with noisy() as one, noisy() as other, ThreadPoolExecutor(2) as threads:
        expected = [run(one), run(other)]
        seed, generator = states(other)
        found = [threads.submit(run, pipe) for pipe in (one, other)]
        while not all(future.done() for future in found):
            now = states(other)
            assert now[0] == seed
            assert torch.equal(now[1], generator)
        for right, future in zip(expected, found, strict=True):
            assert all(map(torch.equal, future.result(), right))
