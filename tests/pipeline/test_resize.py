"""Other devices while training goes on: the same bits, and all that goes on with them."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.history import read_run
from penstock.comparison.reference import run_with_threads
from penstock.observe.charts import history_chart
from penstock.observe.findings import Findings
from penstock.plan.plan import Plan
from penstock.planning import overheads, planner
from penstock.planning.pass_overhead import pass_overhead
from penstock.training.scaling import PipelineScaler
from penstock.workers.backend import Role
from penstock.workers.kinds import OnFailure
from penstock.workers.processes.backend import ProcessBackend
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.threads.backend import ThreadBackend

X, Y = torch.randn(24, 32), torch.randn(24, 32)
COUNT = 4  # micro-batches


class Deep(nn.Module):
    """Layers that can be cut in many places, with statistics, and dropout if wanted."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(6))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.dropout(norm(layer(x)).tanh(), self.dropout, self.training)
        return x


def model(dropout: float = 0.0) -> Deep:
    torch.manual_seed(3)
    return Deep(dropout)


class Run:
    """A pipeline in training, with all that should go on."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        torch.manual_seed(7)
        self.model = model(dropout)
        settings = {"devices": ["cpu"] * 2, "num_microbatches": COUNT} | options
        self.pipe = ps.Pipeline(self.model, (X,), **settings)
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=1e-2)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.losses: list[torch.Tensor] = []

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            self.losses.append(self.pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            self.optimizer.step()
            self.rates.step()
            self.average.update_parameters(self.model)

    def end(self) -> dict[str, torch.Tensor]:
        """All that has come of it; the pipeline is closed."""
        found = tensors_of(self.model, self.optimizer, self.average)
        self.pipe.close()
        return found | {f"loss {k}": loss for k, loss in enumerate(self.losses)}


def tensors_of(
    subject: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module
) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in subject.state_dict().items()}
    found |= {f"average {name}": value.clone() for name, value in average.state_dict().items()}
    for k, own in optimizer.state_dict()["state"].items():
        found |= {f"{name} {k}": value.clone() for name, value in own.items()}
    return found


def plain(steps: int) -> dict[str, torch.Tensor]:
    """What plain PyTorch gets on one device, by accumulating micro-batches."""
    torch.manual_seed(7)
    subject, losses = model(), []
    optimizer = torch.optim.Adam(subject.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    average = torch.optim.swa_utils.AveragedModel(subject)
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(X.chunk(COUNT), Y.chunk(COUNT), strict=True):
            loss = F.mse_loss(subject(x), y) * (len(x) / len(X))
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        rates.step()
        average.update_parameters(subject)
    found = tensors_of(subject, optimizer, average)
    return found | {f"loss {k}": loss for k, loss in enumerate(losses)}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


@pytest.fixture
def all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """New plans have as many replicas as there are devices, whatever was measured."""
    original = planner.plans_on_any

    def plans_on_any(costs: Sequence[ps.Profile], request: Any, *rest: Any, **more: Any) -> Any:
        asked = replace(request, replicas=len(costs[0].devices))
        return original(costs, asked, *rest, **more)

    monkeypatch.setattr(planner, "plans_on_any", plans_on_any)


def through_sizes(run: Run) -> list[tuple[int, int]]:
    """Two steps on two, on one and on three workers; replicas and workers of each."""
    shapes = [(run.pipe.plan.replicas, len(run.pipe.members))]
    run.steps(2)
    for count in (1, 3):
        assert run.pipe.resize(["cpu"] * count)
        shapes.append((run.pipe.plan.replicas, len(run.pipe.members)))
        run.steps(2)
    return shapes


KINDS = ["threads", "processes"]


@pytest.mark.parametrize("workers", KINDS)
def test_stages_have_the_bits_of_one_device(workers: ps.Kind) -> None:
    run = Run(replicas=1, workers=workers)
    assert through_sizes(run) == [(1, 2), (1, 1), (1, 3)]
    threads = run.pipe.threads_per_worker
    found = run.end()
    assert different(found, run_with_threads(lambda: plain(6), threads, 60)) == []


@pytest.mark.usefixtures("all_replicas")
@pytest.mark.parametrize("workers", KINDS)
def test_replicas_have_the_bits_of_one_device(workers: ps.Kind) -> None:
    run = Run(workers=workers)
    assert through_sizes(run) == [(2, 2), (1, 1), (3, 3)]
    threads = run.pipe.threads_per_worker
    found = run.end()
    assert different(found, run_with_threads(lambda: plain(6), threads, 60)) == []


@pytest.mark.parametrize("workers", KINDS)
def test_dropout_goes_on_as_if_nothing_had_happened(workers: ps.Kind) -> None:
    run = Run(0.2, replicas=1, workers=workers)
    through_sizes(run)
    found = run.end()
    other = Run(0.2, replicas=1)
    other.steps(6)
    assert different(found, other.end()) == []


@pytest.mark.parametrize("workers", KINDS)
def test_gradients_that_are_accumulated_stay(workers: ps.Kind) -> None:
    def gradients(change: Callable[[Run], Any]) -> list[torch.Tensor | None]:
        run = Run(replicas=1, workers=workers)
        run.pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        change(run)
        run.pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        found = [copy.deepcopy(p.grad) for p in run.model.parameters()]
        run.pipe.close()
        return found

    found = gradients(lambda run: run.pipe.resize(["cpu"] * 3))
    expected = gradients(lambda run: None)
    pairs = zip(found, expected, strict=True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def test_everything_that_watches_goes_on(tmp_path: Path) -> None:
    run = Run(replicas=1, metrics=0, run=tmp_path / "run", audit=1)
    pipe, numbers, url = run.pipe, [], run.pipe.metrics
    scaler = pipe.scaler(init_scale=4.0)
    pipe.on_step(lambda news: numbers.append(news["step"]))
    with pipe.recording() as timelines:
        run.steps(2)
        audited = pipe.audit.microbatches
        assert pipe.resize(["cpu"] * 3)
        run.steps(2)
    assert len(timelines) == 4
    run.steps(1)
    assert len(timelines) == 4
    assert numbers == [1, 2, 3, 4, 5]
    assert pipe.audit.microbatches == audited + 3
    assert pipe.metrics == url
    served = urllib.request.urlopen(url, timeout=10).read().decode()
    assert 'worker="2"' in served
    status = pipe.status()
    assert (status.steps, len(status.workers)) == (5, 3)
    assert "membership 1, 3 workers instead of 2: cpu joined" in status.events[-1].what
    assert "took" in status.events[-1].what
    kept = read_run(tmp_path / "run")
    assert kept.about.plan == pipe.plan
    assert "cpu joined" in kept.events[-1].what
    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=scaler)
    scaler.step(run.optimizer)
    scaler.update()
    assert loss.isfinite()
    pipe.save(tmp_path / "saved", optimizer=run.optimizer)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    found = ps.load(tmp_path / "saved")
    again = model()
    found.restore(again, optimizer=None)
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
    pipe.close()


@pytest.mark.parametrize("workers", KINDS)
def test_members_say_who_is_there(workers: ps.Kind) -> None:
    run = Run(replicas=1, workers=workers)
    first = run.pipe.members
    assert (first.number, first.since, [m.since for m in first]) == (0, 0, [0, 0])
    assert {m.kind for m in first} == {"thread" if workers == "threads" else "process"}
    run.steps(1)
    assert run.pipe.resize(3)
    second = run.pipe.members
    assert (second.number, second.since) == (1, 1)
    assert [(m.number, str(m.device), m.since) for m in second] == [(k, "cpu", 1) for k in range(3)]
    assert second.difference_from(first) == "membership 1, 3 workers instead of 2: cpu joined"
    assert not run.pipe.resize(["cpu"] * 3)
    assert run.pipe.members is second
    if workers == "processes":
        assert [m.pid for m in second][:2] == [m.pid for m in first]  # they go on
    else:
        assert {m.pid for m in second} == {os.getpid()}
    run.pipe.close()
    if workers == "processes":
        assert not any(os.path.exists(f"/proc/{m.pid}") for m in second)


@pytest.mark.parametrize("way", ["raise", "replace", "continue"])
def test_processes_go_on_and_only_those_that_are_missing_start(way: OnFailure) -> None:
    run = Run(replicas=1, workers="processes", devices=["cpu"] * 3, on_failure=way)
    present = [m.pid for m in run.pipe.members]
    waiting = [p.popen.pid for p in run.pipe._workers._pool._spares]  # type: ignore[attr-defined]
    run.steps(1)
    assert run.pipe.resize(["cpu"])
    assert [m.pid for m in run.pipe.members] == present[:1]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in present[1:])
    run.steps(1)
    spares = [p.popen.pid for p in run.pipe._workers._pool._spares]  # type: ignore[attr-defined]
    assert len(spares) == (way == "replace")
    assert spares == waiting  # which has nothing of a model
    assert run.pipe.resize(["cpu"] * 2)
    assert [m.pid for m in run.pipe.members][: 1 + len(spares)] == [present[0], *spares]
    run.steps(1)
    every = [p.popen.pid for p in run.pipe._workers._pool._spares]  # type: ignore[attr-defined]
    every += [m.pid for m in run.pipe.members]
    threads = run.pipe.threads_per_worker
    assert different(run.end(), run_with_threads(lambda: plain(3), threads, 60)) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in every)


@pytest.mark.parametrize("way", ["raise", "replace", "continue"])
@pytest.mark.parametrize("count", [1, 3])
def test_one_dies_as_it_goes_on_among_others(
    way: OnFailure, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(replicas=1, workers="processes", threads_per_worker=1, on_failure=way)
    run.steps(1)
    victims = [run.pipe.members[0].pid]
    enter = ProcessBackend._enter

    def killed(backend: ProcessBackend) -> None:
        while victims:
            os.kill(victims.pop(), signal.SIGKILL)
        enter(backend)

    monkeypatch.setattr(ProcessBackend, "_enter", killed)
    assert run.pipe.resize(["cpu"] * count)
    assert not victims
    assert len(run.pipe.members) == count
    run.steps(1)
    assert different(run.end(), run_with_threads(lambda: plain(2), 1, 60)) == []


def test_a_ctrl_c_as_processes_go_on_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replicas=1, workers="processes", threads_per_worker=1)
    run.steps(1)
    present, plan = [m.pid for m in run.pipe.members], run.pipe.plan
    survivors = ProcessPool.survivors

    def interrupted(pool: ProcessPool) -> Any:
        found = survivors(pool)
        if len(found) == len(present):
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(ProcessPool, "survivors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.pipe.resize(["cpu"] * 3)
    assert run.pipe.plan.layout == plan.layout
    assert not any(os.path.exists(f"/proc/{pid}") for pid in present)  # others are in their places
    run.steps(1)
    assert different(run.end(), run_with_threads(lambda: plain(2), 1, 60)) == []


def test_links_are_measured_again_only_by_replan(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    real = overheads.with_links

    def noted(*given: Any) -> Any:
        measured.append(given[1])
        return real(*given)

    monkeypatch.setattr(overheads, "with_links", noted)
    run = Run(replicas=1, workers="processes")
    before = len(measured)  # none if another test has measured it
    run.pipe.resize(["cpu"] * 3)
    assert len(measured) == before
    run.pipe.replan()
    assert len(measured) == before + 1
    run.pipe.close()


REFUSED: list[tuple[dict[str, Any], Any, type[Exception], str]] = [
    ({}, ["cpu", "cuda:77"], ps.DeviceError, "cuda:77"),
    ({}, [], ps.InputError, "not a list of devices"),
    ({"replicas": 2}, ["cpu"] * 3, ps.PlanError, "replicas=2.*The workers stay as they are"),
    ({"cuts": ["layers.3"]}, ["cpu"] * 3, ps.PlanError, r"cuts=\['layers.3'\].*stay as they are"),
    ({"cuts": ["layers.3"]}, ["cpu"], ps.PlanError, "The workers stay as they are"),
    ({"replicas": 1}, ["cpu"] * 40, ps.PlanError, "4 micro-batches"),
]


@pytest.mark.parametrize(("options", "devices", "error", "said"), REFUSED)
def test_what_is_refused_changes_nothing(
    options: dict[str, Any], devices: Any, error: type[Exception], said: str
) -> None:
    run = Run(**options)
    pipe = run.pipe
    before = pipe.plan, pipe._workers, pipe.members
    with pytest.raises(error, match=said):
        pipe.resize(devices)
    assert (pipe.plan, pipe._workers, pipe.members) == before
    run.steps(1)
    pipe.close()


def test_results_that_are_still_there_refuse_it() -> None:
    run = Run(replicas=1)
    out = run.pipe(X)
    with pytest.raises(ps.InputError, match=r"resize\(\).*call backward\(\)"):
        run.pipe.resize(3)
    out.sum().backward()
    run.pipe.close()
    with pytest.raises(ps.ClosedError):
        run.pipe.resize(3)


def test_ranks_are_refused_with_what_works() -> None:
    run = Run(replicas=1)
    run.pipe._workers.role = Role(name="rank 0")
    with pytest.raises(ps.InputError, match=r"torchrun has started: pipe.save.*penstock.load"):
        run.pipe.resize(3)
    run.pipe.close()


def fail_to_start(monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """So many workers do not start any more; what the planner measures with them is known."""
    for number in numbers:
        pass_overhead(number)
    for backend in (ThreadBackend, ProcessBackend):
        original: Callable[..., Any] = backend.start

        def start(own: Any, plan: Plan, *rest: Any, original: Callable[..., Any] = original) -> Any:
            found = original(own, plan, *rest)
            if len(plan.devices) in numbers:
                found.close()
                raise OSError("no more workers")
            return found

        monkeypatch.setattr(backend, "start", start)


def children() -> set[str]:
    """The processes that this one has started and that are there."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("workers", KINDS)
def test_the_old_workers_go_on_if_others_cannot_start(
    monkeypatch: pytest.MonkeyPatch, workers: ps.Kind
) -> None:
    run = Run(replicas=1, workers=workers)
    run.steps(2)
    gc.collect()  # pipelines that other tests have left
    plan, before = run.pipe.plan, len(children())
    fail_to_start(monkeypatch, {3})
    with pytest.raises(OSError, match="no more workers") as caught:
        run.pipe.resize(3)
    assert "goes on" in caught.value.__notes__[0]
    assert len(children()) == before
    assert run.pipe.plan == plan
    assert (run.pipe.members.number, len(run.pipe.members)) == (1, 2)
    assert run.pipe.status().steps == 2
    run.steps(4)
    threads = run.pipe.threads_per_worker
    assert different(run.end(), run_with_threads(lambda: plain(6), threads, 60)) == []


def test_if_nobody_can_start_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replicas=1)
    run.steps(2)
    fail_to_start(monkeypatch, {2, 3})
    with pytest.raises(ps.ClosedError, match="build another Pipeline of the same model"):
        run.pipe.resize(3)
    assert run.optimizer.state_dict()["state"]
    with pytest.raises(ps.ClosedError):
        run.steps(1)
    run.pipe.close()


def test_a_failed_save_is_told_before_anything_changes(tmp_path: Path) -> None:
    run = Run(replicas=1)
    run.steps(1)
    blocked = tmp_path / "saved"
    save = run.pipe.save(blocked, background=True)

    def fails() -> None:
        raise ps.CheckpointError("the disk is full")

    save.end = fails  # type: ignore[method-assign]
    before = run.pipe.members
    with pytest.raises(ps.CheckpointError, match="disk is full"):
        run.pipe.resize(3)
    assert run.pipe.members is before
    run.steps(1)
    run.pipe.close()


def test_buffers_do_not_begin_once_more(tmp_path: Path) -> None:
    weights = model().state_dict()
    with ps.empty_weights():
        subject = Deep(0.0)
    with ps.Pipeline(
        subject, (X,), devices=2, num_microbatches=COUNT, replicas=1, weights=weights
    ) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        before = subject.norms[0].running_mean.clone()
        assert pipe.resize(1)
        assert torch.equal(subject.norms[0].running_mean, before)


def test_threads_stay_and_a_plan_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replicas=1)
    threads = run.pipe.threads_per_worker
    assert run.pipe.resize(1)
    assert (run.pipe.threads_per_worker, run.pipe.plan.threads) == (threads, threads)
    monkeypatch.setattr(planner, "_WORTH", 0.0)
    assert not run.pipe.replan()
    assert run.pipe.threads_per_worker == threads
    run.pipe.close()


class Remembering(nn.Module):
    """Remembers what it has done, in attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.scale = 1.0
        self.seen: list[float] = []
        self.average = torch.zeros(32)
        self.noise = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale *= 0.9
        self.seen.append(self.scale)
        self.average.mul_(0.5).add_(x.detach().mean(0))
        noise = torch.rand(1, generator=self.noise)
        return self.inner(x) * self.scale + self.average + noise + len(self.seen)


class Around(nn.Module):
    """Something in the midst of layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.inner = inner
        self.last = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = layer(x).tanh()
        x = self.inner(x)
        for layer in self.last:
            x = layer(x).tanh()
        return x


def around(inner: Callable[[], nn.Module]) -> Around:
    torch.manual_seed(3)
    return Around(inner())


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are measured for a moment only."""
    monkeypatch.setattr(planner, "PROMPT", 0.3)


QUIET: dict[str, Any] = {"num_microbatches": COUNT, "audit": None, "merge": "rows"}
ALONE = QUIET | {"replicas": 1}


@pytest.mark.filterwarnings("ignore::penstock.RowsWarning")
@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("workers", KINDS)
def test_what_modules_remember_goes_on(workers: ps.Kind) -> None:
    def losses(sizes: Sequence[int]) -> tuple[list[float], Remembering]:
        subject, found = around(Remembering), []
        with ps.Pipeline(subject, (X,), devices=2, workers=workers, **QUIET) as pipe:
            for size in sizes:
                pipe.resize(size)
                found += [pipe.train_step(X, target=Y, loss_fn=F.mse_loss).item() for _ in range(2)]
            pipe.resize(2)
        assert isinstance(subject.inner, Remembering)
        return found, subject.inner

    found, inner = losses([2, 3, 1])
    expected, _ = losses([2, 2, 2])
    assert found == expected
    assert len(inner.seen) == 6 * COUNT
    assert inner.scale == inner.seen[-1]


class Locking(nn.Module):
    """Leaves something that is of its process alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.lock: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lock = threading.Lock()
        return self.inner(x)


@pytest.mark.usefixtures("briefly")
def test_what_cannot_be_brought_refuses_it() -> None:
    with ps.Pipeline(around(Locking), (X,), devices=2, workers="processes", **QUIET) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        before = pipe.members
        with pytest.raises(ps.InputError, match=r"'lock' of the module 'inner' \(Locking\)"):
            pipe.resize(3)
        assert pipe.members is before
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


class Shown:
    """A hook that keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(output.detach().sum()))
        return output + len(self.seen) / 8


@pytest.mark.usefixtures("briefly")
def test_what_hooks_remember_goes_on() -> None:
    def losses(sizes: Sequence[int]) -> tuple[list[float], list[float]]:
        subject, hook, found = around(lambda: nn.Linear(32, 32)), Shown(), list[float]()
        subject.inner.register_forward_hook(hook)
        with ps.Pipeline(subject, (X,), devices=2, workers="processes", **ALONE) as pipe:
            for size in sizes:
                pipe.resize(size)
                found.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss).item())
            pipe.resize(1)
        return found, hook.seen

    found, seen = losses([2, 3])
    assert found == losses([2, 2])[0]
    assert len(seen) >= 2 * COUNT


class Counting:
    """A loss that depends on how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return F.mse_loss(output, target) * (1 + self.count / 8)


@pytest.mark.usefixtures("briefly")
def test_a_loss_that_remembers_keeps_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = planner.plans_on_any

    def plans_on_any(costs: Sequence[ps.Profile], request: Any, *rest: Any, **more: Any) -> Any:
        asked.append(request.replicas)
        free = request.replicas == "auto"
        as_many = replace(request, replicas=len(costs[0].devices)) if free else request
        return original(costs, as_many, *rest, **more)

    with ps.Pipeline(
        model(), (X,), devices=2, workers="processes", plan=stages_plan(), audit=None
    ) as pipe:
        pipe.train_step(X, target=Y, loss_fn=Counting())
        monkeypatch.setattr(planner, "plans_on_any", plans_on_any)
        assert pipe.resize(3)
        assert asked == [1]
        assert pipe.plan.replicas == 1
        assert "the loss function" in pipe.plan.note
        pipe.train_step(X, target=Y, loss_fn=Counting())


def stages_plan(**options: Any) -> ps.Plan:
    profile = ps.profile(ps.capture(model(), (X,)), devices=["cpu", "cpu"], seconds=0.2)
    return ps.plan(profile, num_microbatches=COUNT, cuts=["layers.3"], replicas=1, **options)


@pytest.mark.usefixtures("briefly")
def test_what_only_the_plan_says_is_asked_again() -> None:
    plan = replace_fields(
        stages_plan(memory_limit="1GiB", recompute="all"), boundary_dtype="bfloat16"
    )
    with ps.Pipeline(model(), (X,), devices=2, plan=plan, audit=None) as pipe:
        for size in (3, 2):
            assert pipe.resize(size)
            assert pipe.plan.boundary_dtype == "bfloat16"
            assert pipe.plan.memory_limit == 1 << 30
            assert all(stage.recompute for stage in pipe.plan.stages)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("workers", KINDS)
def test_without_gradients_it_is_built_and_resized_as_ever(
    mode: Callable[[], Any], workers: ps.Kind
) -> None:
    subject = model()
    with mode():
        x = X.clone()
        pipe = ps.Pipeline(subject, (x,), devices=2, num_microbatches=COUNT, workers=workers)
        assert pipe.resize(3)
    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert loss.isfinite()
    assert all(p.grad is not None for p in subject.parameters())
    pipe.close()


@pytest.mark.usefixtures("briefly")
def test_step_times_are_of_the_plan_in_use(tmp_path: Path) -> None:
    run = Run(replicas=1, run=tmp_path / "run")
    run.steps(3)
    assert run.pipe.resize(1)
    run.steps(2)
    history = run.pipe.history()
    run.pipe.close()
    for found in (history, read_run(tmp_path / "run")):
        assert found.about.since == 3
        assert sum(steps.steps for steps in found.steps) == 5
        assert sum(steps.steps for steps in found.latest_steps) == 2
        findings = Findings(found)
        assert findings.num_steps == 2
        assert "2 steps since the plan has changed after step 3" in findings.headline
    chart = history_chart(Findings(history))
    assert chart is not None
    assert any("another plan after step 3" in mark.text for mark in chart.marks)


@pytest.mark.usefixtures("briefly")
def test_a_scaler_goes_to_the_last_stage() -> None:
    scaler = PipelineScaler(torch.device("cpu"), Run(replicas=1).pipe._workers, init_scale=4.0)
    scaler.begin()
    scaler.go_on(torch.device("meta"), scaler.workers)
    assert scaler._scale is not None
    assert scaler._scale.device.type == scaler._home.type == "meta"
