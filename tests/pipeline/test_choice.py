"""Pipelines whose kind of plan is chosen: what runs is what the plan says, with the same bits."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.uniform import uniform_plan
from penstock.comparison.reference import run_with_threads
from penstock.planning import planner
from penstock.workers.processes import backend
from penstock.workers.processes.pool import ProcessPool, _Process
from tests.support.models import Remembers

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))


def assert_exact(pipe: ps.Pipeline, before: nn.Module) -> None:
    """A step has the bits of one device with as many threads and micro-batches."""
    twin = copy.deepcopy(before)
    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    count = pipe.plan.num_microbatches

    def plainly() -> torch.Tensor:
        total = torch.zeros(())
        for x, y in zip(X.tensor_split(count), Y.tensor_split(count), strict=True):
            part = F.mse_loss(twin(x), y)
            (part * (len(x) / len(X))).backward()
            total = total + part.detach() * (len(x) / len(X))
        return total

    assert torch.equal(loss, run_with_threads(plainly, pipe.threads_per_worker))
    for ours, theirs in zip(pipe.model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    for name, value in twin.state_dict().items():
        assert torch.equal(value, pipe.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_devices_may_be_left_out(kind: Any) -> None:
    made = model()
    before = copy.deepcopy(made)
    with ps.Pipeline(made, (X,), workers=kind) as pipe:
        workers = len(pipe.plan.devices)
        cores = len(os.sched_getaffinity(0))
        assert len(pipe._workers.members) == workers
        threads = {c.threads for c in pipe.plan.considered if not c.only_compared}
        # One worker may have one thread, too, where dividing small operations costs more.
        assert pipe.plan.threads in ({1, cores} if workers == 1 else {cores // workers})
        assert pipe.threads_per_worker == pipe.plan.threads
        assert threads == {cores // n for n in (1, 2, 4, 8, 16, 32, 64) if n <= cores}
        assert_exact(pipe, before)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_one_device_of_several(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are not started; workers have the threads that they would have with all."""
    monkeypatch.setattr(
        planner,
        "plan_for",
        lambda program, *_, **options: planner.Planned(uniform_plan(program, 1, 3), None),
    )
    made = model()
    before = copy.deepcopy(made)
    with ps.Pipeline(made, (X,), devices=["cpu", "cpu"], workers=kind) as pipe:
        assert [member.replica for member in pipe._workers.members] == [0]
        assert pipe.threads_per_worker == max(1, len(os.sched_getaffinity(0)) // 2)
        assert_exact(pipe, before)
        plan = pipe.plan
    with pytest.raises(ps.PlanError, match="1 device"):  # a given plan has to fit
        ps.Pipeline(model(), (X,), devices=["cpu", "cpu"], plan=plan)


def test_workers_that_have_measured_links_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan needs fewer, none is started anew."""
    monkeypatch.setattr(
        planner,
        "plan_for",
        lambda program, *_, **options: planner.Planned(uniform_plan(program, 1, 3), None),
    )
    monkeypatch.setattr(backend, "ProcessPool", ProcessPool)  # not from the pool of the tests
    started: list[_Process] = []
    begin = _Process.__init__

    def counted(process: _Process, *args: Any) -> None:
        begin(process, *args)
        started.append(process)

    monkeypatch.setattr(_Process, "__init__", counted)
    made = model()
    before = copy.deepcopy(made)
    with ps.Pipeline(made, (X,), workers="processes") as pipe:
        assert len(started) == min(2, len(os.sched_getaffinity(0)))
        assert started[0].popen.poll() is None
        assert [process.has_ended() for process in started[1:]] == [True] * len(started[1:])
        assert_exact(pipe, before)
    assert started[0].has_ended()


def test_a_model_that_remembers_has_one_replica() -> None:
    made = nn.Sequential(model(), Remembers(), nn.Linear(6, 6))
    with ps.Pipeline(made, (X,), devices=["cpu", "cpu"]) as pipe:
        assert pipe.plan.replicas == 1
        if len(pipe.plan.devices) > 1:
            assert "'1.mean', a buffer of Remembers" in pipe.plan.note
    with ps.Pipeline(made, (X,), devices=["cpu", "cpu"], replicas=2) as pipe:
        assert pipe.plan.replicas == 2
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_asking_for_stages() -> None:
    for asked in ({"schedule": "1f1b"}, {"cuts": ["3"]}):
        with ps.Pipeline(model(), (X,), devices=2, **asked) as pipe:  # type: ignore[arg-type]
            assert (pipe.plan.replicas, len(pipe.plan.stages)) == (1, 2)


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu", "cpu"]])
def test_threads_that_were_asked_for(devices: Any) -> None:
    """For whatever number of workers, so that bits do not depend on it; also of the plan."""
    cores = len(os.sched_getaffinity(0))
    for threads in (1, cores + 1):
        made = model()
        before = copy.deepcopy(made)
        with ps.Pipeline(
            made, (X,), workers="threads", devices=devices, threads_per_worker=threads
        ) as pipe:
            assert (pipe.threads_per_worker, pipe.plan.threads) == (threads, threads)
            assert_exact(pipe, before)


@pytest.mark.parametrize("threads", [-1, True, 1.0, "1"])
def test_threads_that_are_no_number(threads: Any) -> None:
    with pytest.raises(ps.InputError, match=r"threads_per_worker=.* must be a number"):
        ps.Pipeline(model(), (X,), threads_per_worker=threads)
