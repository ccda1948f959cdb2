"""`pipe.map`: the results of calls, in order, with several batches under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import mlp, uniform_plan
from tests.support.pool import pooled

X = torch.randn(6, 6)


class Slow(nn.Module):
    def __init__(self, seconds: float, worst: float = 99.0) -> None:
        super().__init__()
        self.seconds, self.worst = seconds, worst
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(self.linear(x), self.seconds, self.worst)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, worst: float) -> torch.Tensor:
        if float(x.detach().abs().max()) > worst:
            raise ZeroDivisionError("too large")
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


@pytest.fixture(params=["threads", "processes"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with pooled():
        yield request.param


def make(kind: Any, *modules: nn.Module) -> ps.Pipeline:
    """A stage for every module, and one micro-batch."""
    count, model = len(modules), nn.Sequential(*modules)
    program = ps.capture(model, (X,), keep_closed=[str(k) for k in range(count)])
    plan = uniform_plan(program, count, 1, "gpipe")
    assert len(program) == count
    devices = ["cpu"] * count
    return ps.Pipeline(model, (X,), devices=devices, program=program, plan=plan, workers=kind)


def test_results_are_those_of_calls(kind: str) -> None:
    batches = [torch.randn(n, 6) for n in (6, 3, 1, 5, 6, 2)]
    with make(kind, mlp(6, 6), nn.Dropout(0.5), mlp(6, 6)) as pipe:
        pipe.eval()
        found = list(pipe.map((b,) for b in batches))
        with torch.no_grad():
            assert all(torch.equal(a, pipe(b)) for a, b in zip(found, batches, strict=True))
        assert not found[0].requires_grad
        assert torch.equal(next(iter(pipe.map([batches[1]]))), found[1])
        assert list(pipe.map([])) == []


def test_the_pipeline_does_not_drain(kind: str) -> None:
    """Ten batches through three stages, each of which sleeps: 12 times that, and not 30."""
    with make(kind, *[Slow(0.03) for _ in range(3)]) as pipe:
        list(pipe.map([X]))
        with pipe.recording() as timelines:
            list(pipe.map([X] * 10))
        assert len(timelines) == 10
        start = time.perf_counter()
        list(pipe.map([X] * 10))
        together = time.perf_counter() - start
        start = time.perf_counter()
        list(pipe.map([X] * 10, ahead=1))
        one_by_one = time.perf_counter() - start
    assert together < 0.7 * one_by_one


def test_batches_are_taken_as_they_are_needed(kind: str) -> None:
    taken = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(100):
            taken.append(number)
            yield X

    with make(kind, mlp(6, 6), mlp(6, 6)) as pipe:
        for number, _ in enumerate(pipe.map(batches(), ahead=3)):
            assert len(taken) <= number + 4
            if number == 5:
                break
        pipe.train_step(X, loss_fn=lambda output: output.mean())  # nothing is left in the way


def test_a_failure_comes_after_the_results_before_it(kind: str) -> None:
    with make(kind, mlp(6, 6), Slow(0.0, worst=50.0), mlp(6, 6)) as pipe:
        good = pipe.model(X).detach()
        found = pipe.map([X, X, 1e6 * X, X, X])
        assert torch.equal(next(found), good)
        assert torch.equal(next(found), good)
        with pytest.raises(ps.WorkerError, match="too large"):
            next(found)
        assert [torch.equal(y, good) for y in pipe.map([X, X])] == [True, True]


def test_training_between_two_results(kind: str) -> None:
    with make(kind, mlp(6, 6), mlp(6, 6)) as pipe:
        twin = mlp(6, 6)
        results = pipe.map([X] * 4, ahead=2)
        next(results)
        pipe.train_step(X, loss_fn=lambda output: output.mean())
        assert all(p.grad is not None for p in pipe.parameters())
        assert len(list(results)) == 3
        del twin


def test_bad_batches(kind: str) -> None:
    with make(kind, mlp(6, 6), mlp(6, 6)) as pipe:
        with pytest.raises(ps.InputError, match="shape"):
            list(pipe.map([X, torch.ones(2, 7)]))
        with pytest.raises(ps.InputError, match="ahead=0"):
            pipe.map([X], ahead=0)
        assert len(list(pipe.map([X]))) == 1


def test_a_batch_that_cannot_be_started_leaves_those_before_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        pooled(),
        ps.Pipeline(
            mlp(6, 6, 6),
            (X,),
            devices=["cpu"] * 2,
            workers="processes",
            num_microbatches=2,
            replicas=1,
        ) as pipe,
    ):
        workers = pipe._runner.workers
        check, calls = workers._shared.check, []

        def refuse(worker: int) -> Any:
            calls.append(worker)
            if len(calls) == 4:  # the second batch, on the last worker
                raise ps.InputError("no")
            return check(worker)

        monkeypatch.setattr(workers._shared, "check", refuse)
        before = pipe._passes._start((X,))
        with pytest.raises(ps.InputError, match="no"):
            pipe._passes._start((2 * X,))
        with torch.no_grad():
            assert torch.equal(pipe._passes._result(before), pipe(X))


def test_another_thread_is_told_so(kind: str) -> None:
    """It must not disturb the batches that are under way."""
    slow = Slow(0.2)
    with make(kind, slow, nn.Linear(6, 6)) as pipe, torch.no_grad():
        expected = pipe(X)
        results = pipe.map([X, X])
        found = [next(results)]  # the next one is under way
        with ThreadPoolExecutor(1) as other:
            call = other.submit(pipe, X)
            with pytest.raises(ps.InputError, match="another thread is using this pipeline"):
                call.result()
        found += results
        assert all(torch.equal(result, expected) for result in found)
        with ThreadPoolExecutor(1) as other, torch.no_grad():  # now it is free
            assert torch.equal(other.submit(_alone, pipe).result(), expected)


def test_batches_that_were_given_up_do_not_end_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in another call gives up those of a loop; closing that leaves a second loop alone."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with make("threads", mlp(6, 6), mlp(6, 6)) as pipe:
        first = pipe.map([X] * 6)
        expected = next(first)
        with monkeypatch.context() as patch:
            patch.setattr(pipe._runner, "_finished", interrupted)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                pipe(X)
        second = pipe.map([X] * 6)
        assert torch.equal(next(second), expected)
        with pytest.raises(ps.ClosedError, match="given up as another one was interrupted"):
            next(first)
        assert pipe._runner.is_busy
        with pytest.raises(ps.InputError, match="take all results of map"):
            pipe.replan()
        assert [torch.equal(y, expected) for y in second] == [True] * 5
        assert not pipe._runner.is_busy


def _alone(pipe: ps.Pipeline) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = pipe(X)
        return result
