"""Actors that die amid whatever they do: others take over, and not a bit changes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.workers.ray.cluster import Cluster
from tests.pipeline import test_on_failure as processes
from tests.pipeline.test_on_failure import (
    COUNT,
    TRAPS,
    Counting,
    Event,
    X,
    Y,
    both,
    built,
    send,
    set_trap,
)
from tests.support.actors import have_ray, lent_actors

HERE = ps.Ray(cpus=1)


@pytest.fixture(autouse=True)
def _ray() -> None:
    have_ray()


def check(folder: Path, events: dict[int, Event], **options: Any) -> ps.Pipeline:
    return processes.check(folder, events, workers=HERE, **options)


def make(model: nn.Module, **options: Any) -> ps.Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "workers": HERE} | options
    return ps.Pipeline(model, (X,), num_microbatches=COUNT, audit=None, **given)


def step(pipe: ps.Pipeline) -> torch.Tensor:
    found: torch.Tensor = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_actor_takes_over_amid_a_pass(tmp_path: Path) -> None:
    pipe = check(tmp_path, {2: set_trap("backward")}, on_failure="replace")
    assert pipe.members.number == 1
    assert len(pipe.members) == 2
    said = pipe.history().events[0].what
    assert "in the backward of micro-batch 0 in stage" in said
    assert "2 workers; others have taken over within" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_an_actor_does_as_it_dies_another_completes_it(tmp_path: Path) -> None:
    pipe = check(tmp_path, TRAPS, on_failure="replace")
    assert pipe.members.number == 4
    said = [event.what for event in pipe.history().events]
    assert [" in the forward of micro-batch 0 in stage" in what for what in said[:2]] == [1, 0]
    assert "during optimizer step" in said[2]


@dataclass(frozen=True)
class Slow:
    """A job: let copies take so many seconds from now on."""

    seconds: float

    def __call__(self, own: Any) -> None:
        send = own.copies._send

        def slowly(*args: Any) -> None:
            time.sleep(self.seconds)
            send(*args)

        own.copies._send = slowly


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_copies_that_take_longer_than_steps(tmp_path: Path) -> None:
    def slow_and(event: Event) -> Event:
        def happen(pipe: ps.Pipeline) -> None:
            pipe._workers._run([Slow(0.4)] * len(pipe.members))  # type: ignore[attr-defined]
            event(pipe)

        return happen

    events = {k: slow_and(TRAPS.get(k, lambda pipe: None)) for k in range(processes.STEPS)}
    pipe = check(tmp_path, events, on_failure="replace")
    assert pipe.members.number == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_replica_after_the_other_dies(tmp_path: Path) -> None:
    events = {1: set_trap("step"), 3: send(0), 4: send(1)}
    pipe = check(tmp_path, events, replicas=2, on_failure="replace", counts=False)
    assert (pipe.members.number, pipe.plan.replicas) == (3, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_those_that_are_left_go_on_by_plans_made_ahead(tmp_path: Path) -> None:
    events = {1: set_trap("forward"), 3: set_trap("step")}
    pipe = check(tmp_path, events, devices=["cpu"] * 3, on_failure="continue")
    assert len(pipe.members) == 1
    assert all("; another plan: " in event.what for event in pipe.history().events)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_goes_on_alone(tmp_path: Path) -> None:
    pipe = check(tmp_path, {1: send(0)}, replicas=2, on_failure="continue", counts=False)
    assert (len(pipe.members), pipe.plan.replicas) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_results_whose_activations_are_lost_are_computed_again(tmp_path: Path) -> None:
    """An actor dies between a call and its backward, in the backward, and in the forward."""

    def lose(pipe: ps.Pipeline) -> None:
        run = pipe._runner.run

        def once(order: Any) -> Any:
            if order.what == "backward":
                pipe._runner.run = run  # type: ignore[method-assign]
                send(1)(pipe)
            return run(order)

        pipe._runner.run = once  # type: ignore[method-assign]

    events = {1: lose, 3: set_trap("backward"), 4: set_trap("forward")}
    pipe = check(tmp_path, events, style="plain", on_failure="replace")
    assert pipe.members.number == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_modules_remember_is_what_it_was_before_the_pass(tmp_path: Path) -> None:
    model = built(tmp_path)
    with make(model, on_failure="replace") as pipe:
        before = model.trap.calls
        for k in range(3):
            if k == 2:
                set_trap("backward")(pipe)
            step(pipe)
        pipe.resize(["cpu"])  # which brings what modules remember
        assert pipe.members.number == 2
        assert model.trap.calls == before + 3 * COUNT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_optimizer_that_remembers_numbers(tmp_path: Path) -> None:
    events = {0: set_trap("step"), 3: set_trap("step")}
    check(tmp_path, events, kind=Counting, on_failure="replace")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_map_goes_on(tmp_path: Path) -> None:
    model = built(tmp_path).eval()
    with torch.no_grad():
        wanted = run_with_threads(
            lambda: [torch.cat([model(x) for x in X.chunk(COUNT)]) for _ in range(6)], 1
        )
    with make(model, on_failure="replace") as pipe:
        found = []
        for k, result in enumerate(pipe.map([X] * 6)):
            found.append(result)
            if k == 1:
                send(0)(pipe)
        assert pipe.members.number == 1
    assert all(map(torch.equal, found, wanted))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    pipe = check(tmp_path, {2: send(0, signal.SIGSTOP)}, on_failure="replace")
    assert "was stopped by a signal" in pipe.history().events[0].what


def eventful(pipe: ps.Pipeline, kill: Callable[[int], None]) -> dict[str, torch.Tensor]:
    """What a script may do between steps; `kill` is called at every moment, with its number."""
    torch.manual_seed(11)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = pipe.scaler(init_scale=8.0, growth_interval=2)
    found = {}
    for k in range(4):
        kill(6 * k)
        found[f"first {k}"] = pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=scaler)
        kill(6 * k + 1)
        found[f"second {k}"] = pipe.train_step(Y, target=X, loss_fn=F.mse_loss, scaler=scaler)
        kill(6 * k + 2)
        scaler.unscale_(optimizer)
        kill(6 * k + 3)
        found[f"norm {k}"] = pipe.clip_grad_norm_(0.1)
        kill(6 * k + 4)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        kill(6 * k + 5)
        if k == 1:
            found["evaluated"] = pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        if k == 2:
            pipe.load_state_dict({n: t * 0.5 for n, t in pipe.state_dict().items()}, strict=False)
        optimizer.zero_grad(set_to_none=k != 1)
    for number, own in optimizer.state_dict()["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in own.items()}
    found["scale"] = torch.tensor(scaler.get_scale())
    return found | {name: value.clone() for name, value in pipe.state_dict().items()}


def plain_layers() -> nn.Module:
    torch.manual_seed(2)
    layers = [[nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1)] for _ in "abc"]
    return nn.Sequential(*(layer for each in layers for layer in each))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moments", [[1, 9, 17], [2, 10, 18], [3, 12, 22], [5, 13, 23], [4, 8, 21]])
def test_accumulation_scaling_clipping_and_what_the_script_changes(moments: list[int]) -> None:
    with make(plain_layers(), workers="threads", threads_per_worker=1) as pipe:
        wanted = eventful(pipe, lambda moment: None)
    with make(plain_layers(), on_failure="replace") as pipe:

        def kill(moment: int) -> None:
            if moment in moments:
                send(moments.index(moment) % 2)(pipe)

        found = eventful(pipe, kill)
        assert pipe.members.number == len(moments)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_worker_and_its_buddy_are_both_gone(tmp_path: Path, is_saved: bool) -> None:
    with make(plain_layers(), on_failure="replace") as pipe:
        step(pipe)
        if is_saved:
            pipe.save(tmp_path / "checkpoint")
        words = str(tmp_path / "checkpoint") if is_saved else "There is no checkpoint of this run"
        both(pipe)
        with pytest.raises(ps.WorkerDied, match=words) as caught:
            step(pipe)
        assert "Nobody that is left has a copy of what worker" in str(caught.value)
        with pytest.raises(ps.ClosedError):
            step(pipe)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_without_room_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(plain_layers(), on_failure="replace", workers=ps.Ray(cpus=1, wait=1.0)) as pipe:
        step(pipe)
        monkeypatch.setattr(Cluster, "placed", lambda *_: {})  # as if the node had gone
        send(0)(pipe)
        with pytest.raises(ps.InputError, match=r"no room for 1 others within 1 s .*autosave"):
            step(pipe)
        with pytest.raises(ps.ClosedError):
            step(pipe)


def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("broken")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_that_fails_and_then_a_death() -> None:
    def train(pipe: ps.Pipeline, disturb: bool) -> list[torch.Tensor]:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        pipe.load_random_state({"seed": 5, "trained": 0, "others": 0})
        losses = []
        for k in range(4):
            optimizer.zero_grad()
            if disturb and k == 2:
                with pytest.raises(ps.WorkerError, match="broken"):
                    pipe.train_step(X, target=Y, loss_fn=broken)
                pipe.load_random_state({"seed": 5, "trained": 2, "others": 0})
                send(1)(pipe)
            losses.append(step(pipe))
            optimizer.step()
        return losses

    with make(plain_layers(), workers="threads", threads_per_worker=1) as pipe:
        wanted = train(pipe, False)
    with make(plain_layers(), on_failure="replace") as pipe:
        found = train(pipe, True)
        assert pipe.members.number == 1
    assert all(map(torch.equal, found, wanted))


def test_nothing_is_copied_unless_it_is_asked_for() -> None:
    with lent_actors(), make(plain_layers()) as pipe:
        step(pipe)
        step(pipe)
        assert pipe._workers.copies is None
        found = pipe._workers._run([_copies_of] * 2)  # type: ignore[attr-defined]
        assert found == [(0, {})] * 2


def _copies_of(own: Any) -> tuple[int, Any]:
    return own.copies.arrived, dict(own.copies.all_of(1))
