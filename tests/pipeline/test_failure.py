"""Whatever fails, the caller gets a named error, nothing hangs, and the next step is clean."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.threads import NewThreads
from tests.support.traps import Trap, divide


def build() -> nn.Module:
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Trap()) for _ in range(3)]
    return nn.Sequential(*stages)


X, Y = torch.randn(12, 6), torch.randn(12, 6)
LOSS = nn.functional.mse_loss


@pytest.fixture
def pipe() -> Iterator[ps.Pipeline]:
    model = build()
    program = ps.capture(model, (X,), keep_closed=["0", "1", "2"])
    costs = ps.profile(program, devices=["cpu"] * 3)
    plan = ps.plan(costs, num_microbatches=4, schedule="1f1b", replicas=1)
    with ps.Pipeline(model, (X,), devices=["cpu"] * 3, program=program, plan=plan) as found:
        yield found


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=LOSS)


def trap(pipe: ps.Pipeline, stage: int) -> Trap:
    found: Trap = pipe.model[stage][2]
    return found


def disarm(pipe: ps.Pipeline) -> None:
    for stage in range(3):
        trap(pipe, stage).disarm()


def assert_clean(pipe: ps.Pipeline, before: dict[str, torch.Tensor]) -> None:
    """Nothing of the failed step is left, and the next one is exactly right."""
    assert all(p.grad is None for p in pipe.parameters())
    after = pipe.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    disarm(pipe)
    twin = copy.deepcopy(pipe.model)
    step(pipe)
    torch.set_num_threads(1)
    for part, target in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
        (LOSS(twin(part), target) * 0.25).backward()
    for ours, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("microbatch", [0, 2])
def test_an_error_in_a_stage(pipe: ps.Pipeline, where: str, stage: int, microbatch: int) -> None:
    before = state(pipe.model)
    trap(pipe, stage).arm(where, divide, after=microbatch)
    with pytest.raises(ps.WorkerError) as caught:
        step(pipe)
    error = caught.value
    assert (error.stage, error.microbatch, error.action) == (stage, microbatch, where)
    assert isinstance(error.__cause__, ZeroDivisionError)
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__cause__.__traceback__)]
    assert "the line that tracebacks must show" in lines[-1]
    assert f"stage {stage} failed in the {where} of micro-batch {microbatch}" in str(error)
    assert_clean(pipe, before)


def test_an_error_in_the_loss(pipe: ps.Pipeline) -> None:
    before = state(pipe.model)
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("no such class")
        return LOSS(output, target)

    with pytest.raises(ps.WorkerError, match="stage 2 failed in the loss of micro-batch 2") as e:
        pipe.train_step(X, target=Y, loss_fn=loss)
    assert (e.value.action, type(e.value.__cause__)) == ("loss", KeyError)
    assert_clean(pipe, before)


def test_an_error_in_the_plain_style(pipe: ps.Pipeline) -> None:
    before = state(pipe.model)
    trap(pipe, 1).arm("forward", divide, after=1)
    with pytest.raises(ps.WorkerError):
        pipe(X)
    assert all(torch.equal(before[n], t) for n, t in pipe.state_dict().items())
    disarm(pipe)
    loss = LOSS(pipe(X), Y)
    between = state(pipe.model)
    trap(pipe, 0).arm("backward", divide, after=2)
    with pytest.raises(ps.WorkerError) as caught:
        loss.backward()
    assert (caught.value.stage, caught.value.action) == (0, "backward")
    assert_clean(pipe, between)


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("no loss")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_graph_outlives_a_step_that_failed(kind: Any) -> None:
    """Unless its weights were changed meanwhile, which is an error as in PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 4, "workers": kind}
    with ps.Pipeline(model, (X,), **options, replicas=1) as pipe:
        LOSS(pipe(X), Y).backward()
        expected = [parameter.grad for parameter in model.parameters()]
        pipe.zero_grad()
        loss, later = LOSS(pipe(X), Y), LOSS(pipe(X), Y)
        with pytest.raises(ps.WorkerError, match="no loss"):
            pipe.train_step(X, target=Y, loss_fn=fails)
        loss.backward()
        assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(ps.WorkerError, match="modified by an inplace operation"):
            later.backward()


def test_accumulated_gradients_survive(pipe: ps.Pipeline) -> None:
    step(pipe)
    objects = [p.grad for p in pipe.parameters()]
    values = [g.clone() for g in objects]
    trap(pipe, 1).arm("backward", divide, after=2)
    with pytest.raises(ps.WorkerError):
        step(pipe)
    for parameter, gradient, value in zip(pipe.parameters(), objects, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output: output, r"shape \(3, 6\).*\.mean\(\)"),
        (lambda output: 1.0, "returned a float"),
        (lambda output: output.detach().mean(), "depends on no parameter"),
    ],
)
def test_a_loss_that_is_no_scalar(pipe: ps.Pipeline, loss: Callable[..., Any], words: str) -> None:
    before = state(pipe.model)
    with pytest.raises(ps.InputError, match=words):
        pipe.train_step(X, loss_fn=loss)
    assert_clean(pipe, before)


def test_ctrl_c(pipe: ps.Pipeline) -> None:
    before = state(pipe.model)
    trap(pipe, 1).arm("forward", partial(time.sleep, 0.5), after=1)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        step(pipe)
    assert_clean(pipe, before)


def test_a_worker_that_does_not_answer() -> None:
    model = build()
    pipe = ps.Pipeline(
        model, (X,), devices=["cpu"] * 3, num_microbatches=2, timeout=0.3, replicas=1
    )
    trap(pipe, 1).arm("forward", partial(time.sleep, 1.0), after=0)
    with pytest.raises(ps.WorkerTimeout, match=r"did not finish within 0 s.*timeout="):
        step(pipe)
    pipe.close()


def test_a_worker_that_never_answers_closes_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.workers.threads import pool as threads

    monkeypatch.setattr(threads, "_GRACE", 0.1)
    pipe = ps.Pipeline(
        build(), (X,), devices=["cpu"] * 3, num_microbatches=2, timeout=0.2, replicas=1
    )
    trap(pipe, 1).arm("forward", partial(time.sleep, 1.5), after=0)
    with pytest.raises(ps.WorkerTimeout):
        step(pipe)
    with pytest.raises(ps.ClosedError, match="still busy"):
        step(pipe)
    pipe.close()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)])
@pytest.mark.parametrize("closed", [(), ("0",)])
def test_statistics_are_put_back_whatever_the_example_held(
    norm: nn.Module, closed: tuple[str, ...]
) -> None:
    """On zeros a running mean stays what it was, so only its neighbours give it away."""
    model = nn.Sequential(nn.Sequential(copy.deepcopy(norm), nn.Identity()), nn.Linear(6, 6))
    program = ps.capture(model, (torch.zeros(12, 6),), keep_closed=closed)
    before = state(model)
    with ps.Pipeline(
        model, (X,), devices=["cpu"] * 2, num_microbatches=3, program=program, replicas=1
    ) as pipe:
        with pytest.raises(ps.InputError):
            pipe.train_step(X, loss_fn=lambda output: 1.0)
        assert [n for n in before if not torch.equal(before[n], pipe.state_dict()[n])] == []


def test_an_interrupt_as_a_worker_reports(
    pipe: ps.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a worker said is lost, so nobody waits for it in vain."""
    from penstock.workers.thread_pool import ThreadPool

    wait, calls = ThreadPool._await_report, []

    def interrupted(workers: Any, current: Any, seconds: float | None) -> None:
        wait(workers, current, seconds)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    before = state(pipe.model)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPool, "_await_report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(pipe)
    assert_clean(pipe, before)


def test_closing_leaves_no_thread(new_threads: NewThreads, pipe: ps.Pipeline) -> None:
    assert len(new_threads()) == 4  # with that which answers `penstock top`
    pipe.close()
    pipe.close()
    assert new_threads() == []
    with pytest.raises(ps.ClosedError, match=r"close\(\) was called"):
        step(pipe)
    with pytest.raises(ps.ClosedError):
        pipe(X)


def test_a_forgotten_pipeline_leaves_no_thread(new_threads: NewThreads) -> None:
    pipe = ps.Pipeline(build(), (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1)
    step(pipe)
    assert len(new_threads()) == 3
    del pipe
    gc.collect()
    deadline = time.monotonic() + 60
    while new_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert new_threads() == []


class Looks(nn.Module):
    """Takes rows of a table by numbers that may be too large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.table[numbers])


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_nobody_prints_an_error_that_is_raised(
    workers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    x, numbers = torch.randn(4, 4), torch.arange(4)
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "progress": None}
    with ps.Pipeline(
        Looks(), (x, numbers), devices=["cpu"] * 2, workers=workers, **options
    ) as pipe:
        capfd.readouterr()
        with pytest.raises(ps.WorkerError, match="index 9 is out of bounds"):
            pipe(x, torch.tensor([0, 1, 2, 9]))
        assert capfd.readouterr().err == ""
