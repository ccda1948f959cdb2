"""Traps of what enters, crosses and leaves a pipeline: each test is named after its trap."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.trees import flatten, unflatten
from penstock.comparison.reference import run_with_threads
from tests.support.models import uniform_plan

X, Y = torch.randn(10, 8), torch.randn(10, 8)
TOKENS = torch.randint(16, (10, 5))
KINDS = pytest.mark.parametrize("workers", ["threads", "processes"])


pytestmark = pytest.mark.usefixtures("pool")


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    loss_fn: Any,
    target: Any = None,
    *,
    cuts: list[Any],
    workers: str,
    m: int = 4,
    captured: tuple[Any, ...] | None = None,
    program: ps.Program | None = None,
) -> ps.Plan:
    """A step gives the bits of a plain loop over the micro-batches, at every one of these cuts."""
    twin = copy.deepcopy(model)
    program = program or ps.capture(model, captured or args)
    plan = uniform_plan(program, len(cuts) + 1, m, cuts=cuts)
    devices = ["cpu"] * len(plan.stages)
    options = {"devices": devices, "program": program, "plan": plan, "workers": workers}
    with ps.Pipeline(model, **options, replicas=1) as pipe:
        loss = pipe.train_step(*args, target=target, loss_fn=loss_fn)

    def accumulate() -> torch.Tensor:
        leaves, structure = flatten((args, target))
        parts = [leaf.tensor_split(m) if leaf is not None else [None] * m for leaf in leaves]
        rows, total = sum(len(part) for part in parts[0]), torch.zeros(())
        for k in range(m):
            given, wanted = unflatten(structure, [part[k] for part in parts])
            arguments = () if wanted is None else (wanted,)
            part = loss_fn(twin(*given), *arguments) * (len(parts[0][k]) / rows)
            part.backward()
            total = total + part.detach()
        return total

    assert torch.equal(loss, run_with_threads(accumulate, 1))
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name
    return plan


@KINDS
def test_twelve_rows_for_a_batch_of_ten(workers: str) -> None:
    """A batch of 10 in 4 micro-batches was padded to 3 rows each, and 12 came back."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 4)
    with ps.Pipeline(
        model, devices=["cpu"] * 2, program=program, plan=plan, workers=workers
    ) as pipe:
        for rows in (10, 9, 6, 3, 1):
            with torch.no_grad():
                output = pipe(X[:rows])
                parts = [model(part) for part in X[:rows].tensor_split(min(rows, 4))]
            assert output.shape == (rows, 3)
            assert torch.equal(output, torch.cat(parts))


class Tokens(nn.Module):
    """Tokens, and integers made of them, are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.table(tokens).mean(1))
        best = hidden.argmax(1)
        scale = (tokens.sum(1) + best).float()[:, None]
        return self.head(hidden.tanh()) * scale


@KINDS
@pytest.mark.parametrize("cut", ["middle", "head"])
def test_integers_over_a_boundary(workers: str, cut: str) -> None:
    """Token ids were given gradients, or were sent as floats."""
    check(Tokens(), (TOKENS,), F.mse_loss, Y, cuts=[cut], workers=workers)


@dataclass
class Result:
    logits: torch.Tensor
    best: torch.Tensor
    nothing: None
    parts: dict[str, Any]


class Mixed(nn.Module):
    """Integers, nothing, containers and a dataclass come out; integers cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Result:
        hidden = self.first(x)
        best = hidden.argmax(1)
        logits = self.second(hidden)
        parts = {"pair": (logits * 2, [hidden.unflatten(1, (2, 4)).mT]), "n": 3}
        return Result(logits, best, None, parts)


@pytest.mark.parametrize("m", [1, 4])
def test_dict_none_and_dataclass_outputs(m: int) -> None:
    """Only tensors and tuples of tensors came out."""
    model = Mixed()
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 3, m)
    with ps.Pipeline(model, devices=["cpu"] * 3, program=program, plan=plan) as pipe:
        ours = pipe(X)
        parts = [model(x) for x in X.tensor_split(m)]
    assert isinstance(ours, Result)
    assert ours.nothing is None
    assert ours.parts["n"] == 3
    assert torch.equal(ours.logits, torch.cat([part.logits for part in parts]))
    assert torch.equal(ours.best, torch.cat([part.best for part in parts]))
    assert torch.equal(ours.parts["pair"][0], torch.cat([p.parts["pair"][0] for p in parts]))
    assert torch.equal(ours.parts["pair"][1][0], torch.cat([p.parts["pair"][1][0] for p in parts]))
    assert m > 1 or not ours.parts["pair"][1][0].is_contiguous()
    loss_fn = lambda o: o.logits.square().mean() + o.parts["pair"][1][0].sum()  # noqa: E731
    check(Mixed(), (X,), loss_fn, cuts=["second"], workers="processes")


class Turned(nn.Module):
    """Gives a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).unflatten(1, (2, 4)).transpose(1, 2)


class Layout(nn.Module):
    """Gives something else for every layout of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1)) * float(x.stride(1) + 10 * x.stride(2))


@KINDS
def test_boundary_tensors_that_are_not_contiguous(workers: str) -> None:
    """They were refused, or arrived in another layout, and then kernels sum in another order."""
    model = nn.Sequential(Turned(), Layout())
    program = ps.capture(model, (X,), keep_closed=["1"])
    check(model, (X,), F.mse_loss, Y, cuts=["1"], workers=workers, program=program)


@KINDS
def test_a_stage_that_begins_in_place(workers: str) -> None:
    """Its input was a leaf that requires a gradient, which must not be changed in place."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    plan = check(model, (X,), F.mse_loss, Y, cuts=["1"], workers=workers)
    assert plan.stages[1].first == "1"


class Forked(nn.Module):
    """One result is used in the three stages after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.a(x).tanh()
        return self.d(self.c(self.b(shared) * shared) + shared) * shared


@KINDS
def test_two_later_stages_that_use_one_output(workers: str) -> None:
    """Its gradient came from one of them only, or was summed in another order."""
    cuts = ["b", "c", "d"] if workers == "threads" else ["c"]
    check(Forked(), (X,), F.mse_loss, Y, cuts=cuts, workers=workers)


class Late(nn.Module):
    """A mask and labels that only the end uses; it returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.c(self.b(self.a(x).tanh()).tanh()).masked_fill(~mask, -1e4)
        return F.cross_entropy(logits, labels), logits


@KINDS
def test_inputs_that_a_late_stage_uses(workers: str) -> None:
    """Only the first stage was given inputs."""
    mask = torch.rand(10, 8) > 0.2
    mask[:, 0] = True
    args = (X, mask, torch.zeros(10, dtype=torch.long))
    cuts = ["b", "c"] if workers == "threads" else ["c"]
    check(Late(), args, lambda output: output[0], cuts=cuts, workers=workers)


@KINDS
def test_a_batch_larger_than_the_traced_one(workers: str) -> None:
    """It aborted the process: buffers had the size of the example."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    x, y = torch.randn(333, 8), torch.randn(333, 8)
    check(model, (x,), F.mse_loss, y, cuts=["2"], workers=workers, captured=(X[:4],))
