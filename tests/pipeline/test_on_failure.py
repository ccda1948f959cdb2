"""Worker processes that end amid whatever they do: others take over, and not a bit changes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.uniform import uniform_plan
from penstock.comparison.reference import run_with_threads
from penstock.links.segment import Segment, place_of
from penstock.planning import planner
from penstock.workers.processes.journal import Chunks, Journal, spans_of
from penstock.workers.processes.workers import ProcessWorkers

X, Y = torch.randn(24, 32), torch.randn(24, 32)
COUNT = 4  # micro-batches
STEPS = 6


def spring(trap: Path) -> None:
    """End this process by force if the trap is set; it is for one process."""
    with contextlib.suppress(FileNotFoundError):
        trap.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class _Trapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: Path) -> torch.Tensor:
        spring(folder / "forward")
        ctx.folder = folder
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        spring(ctx.folder / "backward")
        return gradients[0], None


class Trap(nn.Module):
    """Ends its process if asked to, and counts its calls in its own process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = _Trapped.apply(x, self.folder)
        return result


class Deep(nn.Module):
    """Layers with statistics and a trap."""

    def __init__(self, folder: Path, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(6))
        self.trap = Trap(folder) if counts else nn.Identity()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x)).tanh()
            if k == 3:
                x = self.trap(x)
        return x


class Fatal(torch.optim.Adam):
    """Ends its process in the midst of a step if asked to."""

    folder = Path()

    def __init__(self, *args: Any, folder: Path, **options: Any) -> None:
        self.folder = folder
        super().__init__(*args, **options)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            found = super().step(closure)
        spring(self.folder / "step")
        return found


class Counting(torch.optim.SGD):
    """Remembers a number, as old optimizers do, on which its steps depend."""

    def __init__(self, *args: Any, folder: Path, **options: Any) -> None:
        self.folder = folder
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / self.state[p]["steps"])
        spring(self.folder / "step")


Optimizer = type[Fatal] | type[Counting]
Event = Callable[[ps.Pipeline], None]


def train(
    pipe: ps.Pipeline | nn.Module,
    model: Deep,
    kind: Optimizer,
    events: dict[int, Event] | None = None,
    style: str = "train_step",
) -> dict[str, torch.Tensor]:
    """All that has come of some steps."""
    found = {}
    make = pipe.optimizer if isinstance(pipe, ps.Pipeline) else _plain
    optimizer = make(kind, model.parameters(), lr=1e-2, folder=model.folder)
    for step in range(STEPS):
        optimizer.zero_grad()
        if isinstance(pipe, ps.Pipeline):
            (events or {}).get(step, lambda _: None)(pipe)
        found[f"loss {step}"] = _step(pipe, style)
        optimizer.step()
    for k, own in optimizer.state_dict()["state"].items():
        found |= {f"{name} {k}": torch.as_tensor(value).clone() for name, value in own.items()}
    state = pipe.state_dict() if isinstance(pipe, ps.Pipeline) else model.state_dict()
    return found | {name: value.clone() for name, value in state.items()}


def _plain(kind: Any, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(parameters, **options)
    return optimizer


def _step(pipe: Any, style: str) -> torch.Tensor:
    if isinstance(pipe, ps.Pipeline):
        if style == "train_step":
            loss: torch.Tensor = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            return loss
        whole = F.mse_loss(pipe(X), Y)
        whole.backward()
        return whole.detach()
    if style == "train_step":
        total = torch.zeros(())
        for x, y in zip(X.chunk(COUNT), Y.chunk(COUNT), strict=True):
            part = F.mse_loss(pipe(x), y) * (len(x) / len(X))
            part.backward()
            total += part.detach()
        return total
    parts = [pipe(x) for x in X.chunk(COUNT)]
    cut = torch.cat(parts).detach().requires_grad_()
    whole = F.mse_loss(cut, Y)
    whole.backward()
    for part, gradient in zip(parts, cut.grad.chunk(COUNT), strict=True):
        part.backward(gradient)
    return whole.detach()


def expected(folder: Path, kind: Optimizer, counts: bool, style: str) -> dict[str, torch.Tensor]:
    """What plain PyTorch gets on one device."""
    model = built(folder, counts)
    return run_with_threads(lambda: train(model, model, kind, style=style), 1)


def built(folder: Path, counts: bool = True) -> Deep:
    torch.manual_seed(3)
    return Deep(folder, counts)


def set_trap(name: str) -> Event:
    return lambda pipe: (pipe.model.folder / name).touch()


def send(number: int, what: signal.Signals = signal.SIGKILL) -> Event:
    return lambda pipe: os.kill(pipe.members[number].pid, what)


def both(pipe: ps.Pipeline) -> None:
    send(0)(pipe)
    send(1)(pipe)


def check(
    folder: Path,
    events: dict[int, Event],
    kind: Optimizer = Fatal,
    style: str = "train_step",
    counts: bool = True,
    **options: Any,
) -> ps.Pipeline:
    """Raise unless a run through these events ends as plain PyTorch does."""
    wanted = expected(folder, kind, counts, style)
    model = built(folder, counts)
    settings = {"devices": ["cpu"] * 2, "replicas": 1, "workers": "processes"} | options
    pipe = ps.Pipeline(model, (X,), num_microbatches=COUNT, audit=None, **settings)
    with pipe:
        found = train(pipe, model, kind, events, style)
        assert not list(folder.iterdir())  # every trap was sprung
        assert found.keys() == wanted.keys()
        assert [k for k, value in found.items() if not torch.equal(value, wanted[k])] == []
    return pipe


TRAPS = {1: set_trap("forward"), 2: set_trap("backward"), 3: set_trap("step"), 4: send(0)}


def test_whatever_a_worker_does_as_it_ends_another_completes_it(tmp_path: Path) -> None:
    pipe = check(tmp_path, TRAPS, on_failure="replace")
    assert pipe.members.number == 4
    assert len(pipe.members) == 2
    said = [event.what for event in pipe.history().events]
    assert [" in the forward of micro-batch 0 in stage" in what for what in said[:2]] == [1, 0]
    assert "in the backward of micro-batch 0" in said[1]
    assert "during optimizer step" in said[2]
    assert all("2 workers; others have taken over within" in what for what in said)


def test_replicas_are_replaced_and_two_at_once(tmp_path: Path) -> None:
    events = {2: set_trap("step"), 3: both, 5: send(1)}
    pipe = check(tmp_path, events, replicas=2, on_failure="replace", counts=False)
    assert pipe.members.number == 3


def test_those_that_are_left_go_on_by_plans_made_ahead(tmp_path: Path) -> None:
    events = {1: set_trap("forward"), 3: set_trap("step")}
    pipe = check(tmp_path, events, devices=["cpu"] * 3, on_failure="continue")
    assert len(pipe.members) == 1
    assert all("; another plan: " in event.what for event in pipe.history().events)


def test_a_replica_goes_on_alone(tmp_path: Path) -> None:
    events = {1: send(0)}
    pipe = check(tmp_path, events, replicas=2, on_failure="continue", counts=False)
    assert (len(pipe.members), pipe.plan.replicas) == (1, 1)


def lose(pipe: ps.Pipeline) -> None:
    """Let a worker end between the next call and its backward."""
    run = pipe._runner.run

    def once(order: Any) -> Any:
        if order.what == "backward":
            pipe._runner.run = run  # type: ignore[method-assign]
            send(1)(pipe)
            pipe.model.eval()  # which the forward was not
        try:
            return run(order)
        finally:
            pipe.model.train()

    pipe._runner.run = once  # type: ignore[method-assign]


def test_results_whose_activations_are_lost_are_computed_again(tmp_path: Path) -> None:
    """A worker ends between a call and its backward, and in the backward."""

    events = {1: lose, 3: set_trap("backward"), 4: set_trap("forward")}
    pipe = check(tmp_path, events, style="plain", on_failure="replace")
    assert pipe.members.number == 3


def test_a_forward_that_others_run_again_moves_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has ended in a worker before the script goes on."""
    start = ProcessWorkers.start

    def slowly(self: ProcessWorkers, order: Any) -> Any:
        ticket = start(self, order)
        time.sleep(0.1)
        return ticket

    monkeypatch.setattr(ProcessWorkers, "start", slowly)
    pipe = check(tmp_path, {1: set_trap("forward")}, style="plain", on_failure="replace")
    assert pipe.members.number == 1


class Leaky(nn.Module):
    """Reads a buffer, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scale.clone()
        if self.training:
            with torch.no_grad():
                self.scale.mul_(1.5)
        return x


def check_a_forward_again(**given: Any) -> None:
    """What it has changed itself, and what the script has set since."""
    model = nn.Sequential(Leaky(), nn.Dropout(0.5), Leaky())
    x, found = torch.randn(4, 6), []
    options: dict[str, Any] = {"workers": "processes", "replicas": 1, "on_failure": "replace"}
    options |= {"devices": ["cpu"] * 2, "num_microbatches": 2, "audit": None} | given
    for dies in (False, True):
        own = copy.deepcopy(model)
        torch.manual_seed(1)
        with ps.Pipeline(own, (x,), **options) as pipe:
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)  # which changes buffers as well
            result = pipe(x)
            pipe.eval()
            if dies:
                os.kill(pipe.members[0].pid, signal.SIGKILL)
            result.square().sum().backward()
            assert not own[1].training
            assert pipe.members.number == dies
            state = [*pipe.gradients().values(), *pipe.state_dict().values()]
            found.append([tensor.clone() for tensor in state])
    assert all(map(torch.equal, *found))


def test_a_forward_that_is_run_again_finds_the_model_as_it_was() -> None:
    check_a_forward_again()


def test_what_modules_remember_is_what_it_was_before_the_pass(tmp_path: Path) -> None:
    model = built(tmp_path)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "on_failure": "replace"}
    with ps.Pipeline(
        model, (X,), workers="processes", num_microbatches=COUNT, audit=None, **options
    ) as pipe:
        before = model.trap.calls
        for step in range(3):
            if step == 2:
                set_trap("backward")(pipe)
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        pipe.resize(["cpu"])  # which brings what modules remember
        assert pipe.members.number == 2
        assert model.trap.calls == before + 3 * COUNT


def test_an_optimizer_that_remembers_numbers(tmp_path: Path) -> None:
    check(tmp_path, {0: set_trap("step"), 3: set_trap("step")}, Counting, on_failure="replace")


def test_an_optimizer_that_remembers_numbers_begins_again(tmp_path: Path) -> None:
    with surviving(built(tmp_path), X) as pipe:
        optimizer = pipe.optimizer(Counting, lr=1e-2, folder=tmp_path)
        initial = optimizer.state_dict()
        for step in range(4):
            if step == 3:
                optimizer.load_state_dict(initial)
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        assert {values["steps"] for values in state.values()} == {1}


def end_when_updated(x: torch.Tensor, trap: Path, driver: int) -> None:
    """Let a worker's process end, if the trap is set, when its optimizer has done its step."""
    step = Chunks.step
    if os.getpid() == driver or step.__name__ != "step":
        return

    def trapped(chunks: Chunks, settings: Any) -> bool:
        is_there = step(chunks, settings)
        spring(trap)
        return is_there

    Chunks.step = trapped  # type: ignore[method-assign]


def test_a_step_that_was_complete_is_not_said_to_find_no_gradient(tmp_path: Path) -> None:
    x, found = torch.randn(4, 6), []
    look = partial(end_when_updated, trap=tmp_path / "trap", driver=os.getpid())
    model = nn.Sequential(Looking(look), nn.Linear(6, 6))
    for dies in (False, True):
        own = copy.deepcopy(model)
        with surviving(own, x, devices=["cpu"]) as pipe, warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                pipe.train_step(x, target=x, loss_fn=F.mse_loss)
                if dies and step == 4:
                    (tmp_path / "trap").touch()
                optimizer.step()
            assert pipe.members.number == dies
            found.append([value.clone() for value in pipe.state_dict().values()])
    assert all(map(torch.equal, *found))


def test_map_goes_on(tmp_path: Path) -> None:
    model = built(tmp_path).eval()
    with torch.no_grad():
        wanted = run_with_threads(
            lambda: [torch.cat([model(x) for x in X.chunk(COUNT)]) for _ in range(6)], 1
        )
    with ps.Pipeline(
        model,
        (X,),
        devices=["cpu"] * 2,
        replicas=1,
        workers="processes",
        on_failure="replace",
        num_microbatches=COUNT,
        audit=None,
    ) as pipe:
        found = []
        for k, result in enumerate(pipe.map([X] * 6)):
            found.append(result)
            if k == 1:
                send(0)(pipe)
        assert pipe.members.number == 1
    assert all(map(torch.equal, found, wanted))


def check_training_amid_map(folder: Path, **options: Any) -> None:
    """A worker dies when weights have changed since the batches under way began."""
    model = built(folder, counts=False).eval()
    plain, batches = copy.deepcopy(model), [torch.randn(24, 32) for _ in range(6)]

    @torch.no_grad()
    def results() -> list[torch.Tensor]:
        return [torch.cat([plain(x) for x in batch.chunk(COUNT)]) for batch in batches]

    def trained() -> list[torch.Tensor]:
        before = results()
        for x, y in zip(X.chunk(COUNT), Y.chunk(COUNT), strict=True):
            (F.mse_loss(plain(x), y) / COUNT).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        return before[:3] + results()[3:]

    wanted = run_with_threads(trained, 1)
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "workers": "processes"}
    given |= {"on_failure": "replace", "num_microbatches": COUNT, "audit": None} | options
    with ps.Pipeline(model, (X,), **given) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        found = []
        for k, result in enumerate(pipe.map(batches, ahead=3)):
            found.append(result)
            if k == 0:
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                optimizer.step()
                send(0)(pipe)
        assert pipe.members.number == 1
    assert [torch.equal(*both) for both in zip(found, wanted, strict=True)] == [True] * 6


def test_batches_of_map_that_were_under_way_as_weights_changed(tmp_path: Path) -> None:
    check_training_amid_map(tmp_path)


class _Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[torch.Tensor], None]) -> torch.Tensor:
        look(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Looking(nn.Module):
    """Calls a function with its input, also when its calls are replayed."""

    def __init__(self, look: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Looking.apply(x, self.look)
        return result


def take_time(x: torch.Tensor) -> None:
    time.sleep(0.2)


def refuse_large(x: torch.Tensor) -> None:
    if x.max() > 100:
        raise ValueError("too large")


@pytest.mark.parametrize("changes", ["nothing", "modes", "weights"])
def test_what_the_script_does_while_batches_of_map_are_under_way(changes: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Looking(take_time), nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)
    ).eval()
    batches = [torch.randn(4, 6) for _ in range(3)]
    with torch.no_grad():
        wanted = run_with_threads(
            lambda: [torch.cat([model(x) for x in batch.chunk(2)]) for batch in batches], 1
        )
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "workers": "processes"}
    given |= {"on_failure": "replace", "num_microbatches": 2, "audit": None}
    with ps.Pipeline(model, (batches[0],), **given) as pipe:
        results = pipe.map(batches, ahead=3)
        found = [next(results)]
        if changes == "modes":
            pipe.train()
        elif changes == "weights":
            with torch.no_grad():
                model[1].weight.mul_(2.0)
        send(0)(pipe)
        if changes == "weights":
            with pytest.raises(ps.InputError, match="take all results of map"):
                list(results)
        else:
            found += results
            assert all(map(torch.equal, found, wanted))
            assert pipe.members.number == 1
            assert model.training == (changes == "modes")


def surviving(model: nn.Module, x: torch.Tensor, **options: Any) -> ps.Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "workers": "processes"}
    given |= {"on_failure": "replace", "num_microbatches": 2, "audit": None} | options
    return ps.Pipeline(model, (x,), **given)


def test_a_batch_of_map_that_fails_does_not_fail_the_training_between() -> None:
    x = torch.randn(4, 6)
    with surviving(
        nn.Sequential(Looking(refuse_large), nn.Linear(6, 6), nn.Linear(6, 6)), x
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        results = pipe.map([x, x + 1000, x], ahead=3)
        next(results)
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        optimizer.step()
        with pytest.raises(ps.WorkerError, match="too large"):
            next(results)


def test_a_forward_is_not_run_again_with_other_weights() -> None:
    x = torch.randn(4, 6)
    with surviving(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), x) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        result = pipe(x)
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        optimizer.step()
        send(0)(pipe)
        pipe.eval_step(x, target=x, loss_fn=F.mse_loss)
        assert pipe.members.number == 1
        with pytest.raises(ps.InputError, match="parameters have changed since that batch began"):
            result.sum().backward()


def test_a_worker_that_is_replaced_leaves_all_devices_to_later_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the plan in use needs fewer."""
    monkeypatch.setattr(
        planner,
        "plan_for",
        lambda program, *_, **options: planner.Planned(uniform_plan(program, 1, 2), None),
    )
    x = torch.randn(4, 6)
    with surviving(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), x, devices=["cpu"] * 3, replicas="auto"
    ) as pipe:
        assert len(pipe.members) == 1
        send(0)(pipe)
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        assert pipe.members.number == 1
        assert not pipe.resize(3)
        assert pipe.members.number == 1


def test_a_number_of_workers_that_was_asked_for_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan may use fewer workers than there could be; the next number is tried again."""
    x = torch.randn(4, 6)
    tried: list[int] = []

    def resize(pipe: ps.Pipeline, devices: list[str], **_: Any) -> bool:
        tried.append(len(devices))
        if len(devices) == 5:
            raise ps.PlanError("there are 2 layers")
        return False

    wanted = iter([4, 4, 4, 5, 5, 4])
    with ps.Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), (x,), devices=2) as pipe:
        monkeypatch.setattr(ps.Pipeline, "resize", resize)
        monkeypatch.setattr(type(pipe._workers), "wanted", lambda workers: next(wanted))
        for _ in range(6):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert tried == [4, 5, 4]


def test_a_pass_that_is_refused_before_it_begins_is_not_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(order: Any) -> None:
        raise ps.InputError("not now")

    x = torch.randn(4, 6)
    with surviving(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), x) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(pipe._runner, "_before", refuse)
            with pytest.raises(ps.InputError, match="not now"):
                pipe(x)
        assert not pipe._runner.is_busy


def check_two_deaths_amid_map(**options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Looking(take_time), nn.Linear(6, 6), nn.Linear(6, 6))
    batches = [torch.randn(4, 6) for _ in range(3)]
    with surviving(model, batches[0], **options) as pipe:
        pipe.train_step(batches[0], target=batches[0], loss_fn=F.mse_loss)
        wanted = list(pipe.map(batches))
        results = pipe.map(batches, ahead=3)
        found = [next(results)]
        for number in (0, 1):
            send(number)(pipe)
            found.append(next(results))
        assert all(map(torch.equal, found, wanted))
        assert pipe.members.number == 2


def test_two_deaths_while_batches_of_map_are_under_way() -> None:
    check_two_deaths_amid_map()


def test_a_worker_that_is_asked_to_end_does_so_between_two_steps(tmp_path: Path) -> None:
    processes: list[Any] = []

    def ask(pipe: ps.Pipeline) -> None:
        processes.append(pipe._workers._pool._processes[1])  # type: ignore[attr-defined]
        send(1, signal.SIGTERM)(pipe)

    pipe = check(tmp_path, {2: ask}, on_failure="replace")
    assert processes[0].popen.returncode == 0
    assert "a worker was asked to end (SIGTERM)" in pipe.history().events[0].what


def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    pipe = check(tmp_path, {2: send(0, signal.SIGSTOP)}, on_failure="replace")
    assert "was stopped by a signal for seconds, and then ended" in pipe.history().events[0].what


def test_work_that_ends_every_worker_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(tmp_path)
    with ps.Pipeline(
        model,
        (X,),
        devices=["cpu"] * 2,
        replicas=1,
        workers="processes",
        on_failure="replace",
        num_microbatches=COUNT,
        audit=None,
    ) as pipe:
        run = pipe._running.recover

        def again(death: Any, deaths: int) -> None:
            (tmp_path / "forward").touch()
            run(death, deaths)

        monkeypatch.setattr(pipe._running, "recover", again)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)  # this process runs a forward, too
        before = {k: v.clone() for k, v in model.state_dict().items()}
        set_trap("forward")(pipe)
        with pytest.raises(ps.WorkerDied, match="in the forward of micro-batch 0") as raised:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert "each time a worker has ended at the same work" in raised.value.__notes__[-1]
        (tmp_path / "forward").unlink()  # or it would end this process
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        with pytest.raises(ps.ClosedError):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_nobody_is_left(tmp_path: Path) -> None:
    with ps.Pipeline(
        built(tmp_path),
        (X,),
        devices=["cpu"] * 2,
        workers="processes",
        on_failure="continue",
        num_microbatches=COUNT,
        audit=None,
        replicas=1,
    ) as pipe:
        both(pipe)
        with pytest.raises(ps.WorkerDied) as raised:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert "No worker is left to go on." in raised.value.__notes__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_failure": "ignore"}, "choose one of raise, replace, continue"),
        (
            {"on_failure": "replace"},
            'is for workers="processes" and workers="ray", not for threads',
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.InputError, match=message):
        ps.Pipeline(nn.Linear(2, 2), (torch.ones(4, 2),), devices=["cpu"] * 2, **options)


def test_a_journal_puts_back_the_chunk_that_was_being_updated() -> None:
    parameters = [nn.Parameter(torch.full((3,), float(k))) for k in range(3)]
    chunks = [[p] for p in parameters]
    spans = [spans_of(chunk, [None]) for chunk in chunks]
    segment = Segment(Journal.size_of(spans))
    driver = Journal(segment, chunks, spans)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    driver.clear()
    assert Chunks(optimizer, {"lr": 1.0}, chunks, segment, spans).step([{"lr": 1.0}])
    assert driver.put_back() == 3
    assert [p[0].item() for p in parameters] == [-1.0, 0.0, 1.0]
    driver.clear()
    driver.begin(0)
    driver.end(0)
    driver.begin(1)
    with torch.no_grad():
        parameters[1].fill_(9.0)
    assert driver.put_back() == 1
    assert [p[0].item() for p in parameters] == [-1.0, 0.0, 1.0]


def test_memory_that_lies_together_is_copied_at_once() -> None:
    segment, other = Segment(1024), Segment(64)
    places = [
        place_of(torch.empty(5), 0),
        place_of(torch.empty(3), 20),
        place_of(torch.empty(2), 512),
    ]
    tensors = [*segment.tensors(places), *other.tensors([place_of(torch.empty(2), 0)])]
    homes = [segment, segment, segment, other]
    assert sorted(spans_of(tensors, homes)) == [(0, 64 + 12), (2, 8), (3, 8)]
    assert sorted(spans_of(tensors[1::-1], homes[:2])) == [(1, 64 + 12)]


@pytest.mark.parametrize("way", ["replace", "continue"])
def test_another_dies_as_one_was_asked_to_end(tmp_path: Path, way: str) -> None:
    events = {2: send(1, signal.SIGTERM), 3: send(0)}
    devices = ["cpu"] * 3
    pipe = check(tmp_path, events, devices=devices, on_failure=way, timeout=60)
    assert len(pipe.members) == (3 if way == "replace" else 1)
    assert "was killed by SIGKILL" in pipe.history().events[0].what


def test_the_only_one_that_is_left_was_asked_to_end(tmp_path: Path) -> None:
    """It takes over for a moment, and hands over to a new one before the next pass."""
    events = {2: send(0, signal.SIGTERM), 3: send(1)}
    pipe = check(tmp_path, events, on_failure="continue", timeout=60)
    died, left = (event.what for event in pipe.history().events)
    assert "was killed by SIGKILL" in died
    assert "a worker was asked to end (SIGTERM)" in left
    assert len(pipe.members) == 1


def test_what_cannot_be_handed_over_is_said(tmp_path: Path) -> None:
    def keep(module: nn.Module, *_: Any) -> None:
        if os.getpid() != driver:
            module.held = threading.Lock()  # type: ignore[assignment]

    driver, model = os.getpid(), built(tmp_path)
    model.layers[5].register_forward_hook(keep)
    with surviving(model, X) as pipe:
        send(1, signal.SIGTERM)(pipe)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        counted = pipe.random_state()
        with pytest.raises(ps.InputError, match="The pipeline is closed"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert pipe.random_state() == counted
        with pytest.raises(ps.ClosedError):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
