"""Under autocast a pipeline gives the bits of one device under the same autocast."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from tests.support.models import cases, uniform_plan
from tests.support.pool import pooled
from tests.support.precision import X, Y, gradients, island, pipe_of

DTYPES = [torch.bfloat16, torch.float16]
CPUS = ["cpu"] * 2


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", "none"), ("zero-bubble", "none"), ("interleaved", "none"), ("zero-bubble", "all")],
)
def test_a_step_is_that_of_one_device(dtype: torch.dtype, schedule: str, recompute: str) -> None:
    model = island()
    with pipe_of(model, schedule, recompute, devices=CPUS) as pipe:
        twin = copy.deepcopy(model)
        reference = one_device(twin, pipe.program, 3, (X,), {})
        for step in range(2):
            with torch.autocast("cpu", dtype):
                loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                alone = run_with_threads(lambda s=step: reference.train_step(s, F.mse_loss, Y), 1)
            assert torch.equal(loss, alone)
            assert_same(model, twin)


@pytest.mark.parametrize(
    ("name", "workers"), [("named", "processes"), ("unet", "threads"), ("gpt2", "threads")]
)
def test_verify_under_autocast(name: str, workers: Any) -> None:
    case = cases()[name]
    with pooled(), torch.autocast("cpu", torch.bfloat16):
        plan = uniform_plan(ps.capture(case.model(), case.args, case.kwargs), 2, 3)
        report = ps.verify(
            *(case.model(), case.args, case.kwargs),
            target=case.target,
            loss_fn=case.loss_fn,
            devices=CPUS,
            plan=plan,
            workers=workers,
        )
    assert report.ok, str(report)


@pytest.mark.parametrize("inside", [False, True])
def test_the_backward_is_where_it_is_called(inside: bool) -> None:
    """Under autocast, which casts what it multiplies, or not."""
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    x, y = X[:3], Y[:3]

    def step(forward: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(forward(x), y)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    with pipe_of(model, microbatches=1, devices=CPUS) as pipe:
        step(pipe)
    run_with_threads(lambda: step(twin), 1)
    assert_same(model, twin)


def test_train_steps_backward_is_outside() -> None:
    """As PyTorch wants it, and as if it were written so."""
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    with pipe_of(model, devices=CPUS) as pipe, torch.autocast("cpu", torch.bfloat16):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

    def alone() -> None:
        for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(twin(x), y) * (len(x) / len(X))
            loss.backward()

    run_with_threads(alone, 1)
    assert_same(model, twin)


def test_a_pipeline_can_be_built_and_planned_under_autocast() -> None:
    """With inputs that only autocast can bring together with the weights."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    x = X.new_ones(6, 6, dtype=torch.bfloat16)
    with (
        torch.autocast("cpu", torch.bfloat16),
        ps.Pipeline(model, (x,), devices=2, num_microbatches=2, progress=None) as pipe,
    ):
        assert pipe(x).dtype is torch.bfloat16


def test_the_cache_of_weights_is_followed() -> None:
    """A weight that is used twice gets its gradient in another precision without."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[3] = model[1]
    found = []
    for cached in (True, False):
        ours, twin = copy.deepcopy(model), copy.deepcopy(model)
        region = torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)
        with pipe_of(ours, cuts=[1], devices=CPUS) as pipe, region:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            reference = one_device(twin, pipe.program, 3, (X,), {})
            run_with_threads(lambda r=reference: r.train_step(0, F.mse_loss, Y), 1)
        assert_same(ours, twin)
        found.append(gradients(pipe)["1.weight"])
    assert not torch.equal(*found)


class Slow(nn.Module):
    """Uses a weight twice, and takes its time in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        time.sleep(0.2)
        return self.linear(x)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_worker_that_is_done_leaves_the_others_cache(recompute: str) -> None:
    """PyTorch's cache of cast weights is one for all threads, and cleared where a region ends."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), Slow())
    twin = copy.deepcopy(model)
    program = ps.capture(model, (X,), keep_closed=["1"])
    plan = uniform_plan(program, 2, 1, recompute=recompute)
    with ps.Pipeline(model, devices=CPUS, program=program, plan=plan) as pipe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(pipe(X), Y)
            loss.backward()

    def alone() -> None:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(twin(X), Y)
            loss.backward()

    run_with_threads(alone, 1)
    assert_same(model, twin)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_weights_that_were_cast_are_forgotten_between_steps(workers: Any) -> None:
    """Also in a region that spans several steps."""
    model = island(dropout=0.0)
    with pooled(), pipe_of(model, devices=CPUS, workers=workers) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                with torch.no_grad():
                    pipe(X)  # without gradients: what it casts has none either
                optimizer.zero_grad()
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                twin = copy.deepcopy(model)
                optimizer.step()
            found = gradients(pipe)
    reference = one_device(twin, pipe.program, 3, (X,), {})
    twin.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        run_with_threads(lambda: reference.train_step(0, F.mse_loss, Y), 1)
    for name, p in twin.named_parameters():
        assert torch.equal(found[name], p.grad), name


class Refine(nn.Module):
    """Uses one cell several times, in autocast regions of its own."""

    def __init__(self, regions: int = 4, uses: int = 1, opened: bool = True) -> None:
        super().__init__()
        self.i, self.cell, self.o = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.regions, self.uses = regions, uses
        self.opened = opened

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.i(x)
        for _ in range(self.regions):
            with torch.autocast("cpu", torch.bfloat16):
                d = h
                for _ in range(self.uses):
                    d = self.cell(d)
            h = torch.tanh(h + d.float())
        if not self.opened:
            self.last = None  # an assignment closes it
        return self.o(h)


def plain_step(model: nn.Module) -> None:
    """A loop over micro-batches in plain PyTorch, in the thread of the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
            (F.mse_loss(model(x), y) * (len(x) / len(X))).backward()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("regions", "uses"), [(4, 1), (1, 3)])
def test_regions_of_the_model_are_the_outermost(
    opened: bool, devices: int, regions: int, uses: int
) -> None:
    """A weight is cast once in each; its gradients are summed in its own precision between them."""
    model = nn.Sequential(Refine(regions, uses, opened), nn.Tanh(), nn.Linear(6, 6))
    twin = copy.deepcopy(model)
    cuts = [] if devices == 1 else ["1"]
    options: dict[str, Any] = {"devices": ["cpu"] * devices, "cuts": cuts, "replicas": 1}
    with ps.Pipeline(model, (X,), num_microbatches=3, progress=None, **options) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    plain_step(twin)
    assert_same(model, twin)


def test_the_reference_runs_regions_of_the_model_as_the_outermost() -> None:
    model = Refine()
    twin = copy.deepcopy(model)
    plain_step(model)
    run_with_threads(lambda: plain_step(twin), 1)
    assert_same(model, twin)


def test_regions_of_the_model_are_inside_of_the_scripts() -> None:
    model = nn.Sequential(Refine(), nn.Tanh(), nn.Linear(6, 6))
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"devices": CPUS, "cuts": ["1"], "replicas": 1}
    with (
        ps.Pipeline(model, (X,), num_microbatches=3, progress=None, **options) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        reference = one_device(twin, pipe.program, 3, (X,), {})
        run_with_threads(lambda: reference.train_step(0, F.mse_loss, Y), 1)
    assert_same(model, twin)
