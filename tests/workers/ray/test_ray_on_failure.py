"""Actors that die amid whatever they do: others take over, and not a bit changes."""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.changing import Fallbacks
from penstock.comparison.reference import run_with_threads
from penstock.runner import Runner
from penstock.workers.ray import copying
from penstock.workers.ray.cluster import Cluster, ray
from penstock.workers.ray.copies import Change
from penstock.workers.ray.pickled import pickled
from penstock.workers.redo import Work
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
    lose,
    send,
    set_trap,
)
from tests.support.actors import have_room, lent_actors

HERE = ps.Ray(cpus=1)


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for actors, and copies are made before every pass, if none is being sent."""
    have_room()
    monkeypatch.setattr(copying, "_SHARE", math.inf)


def check(folder: Path, events: dict[int, Event], **options: Any) -> ps.Pipeline:
    return processes.check(folder, events, workers=HERE, **options)


def make(model: nn.Module, **options: Any) -> ps.Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "replicas": 1, "workers": HERE} | options
    return ps.Pipeline(model, (X,), num_microbatches=COUNT, audit=None, **given)


def step(pipe: ps.Pipeline) -> torch.Tensor:
    found: torch.Tensor = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_an_actor_does_as_it_dies_another_completes_it(tmp_path: Path) -> None:
    pipe = check(tmp_path, TRAPS, on_failure="replace")
    assert pipe.members.number == 4
    said = [event.what for event in pipe.history().events]
    assert [" in the forward of micro-batch 0 in stage" in what for what in said[:2]] == [1, 0]
    assert "during optimizer step" in said[2]
    assert all("2 workers; others have taken over within" in what for what in said)


@dataclass(frozen=True)
class Arm:
    """A job: let a worker end as it sends its next copy, before or after its buddy has it."""

    worker: int
    is_sent: bool

    def __call__(self, own: Any) -> None:
        if own.worker != self.worker:
            return
        send = own.copies._send

        def fatal(*args: Any) -> None:
            if self.is_sent:
                send(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        own.copies._send = fatal


@dataclass(frozen=True)
class Slow:
    """A job: let the next copy take so many seconds that is waited for."""

    seconds: float

    def __call__(self, own: Any) -> None:
        send = own.copies.send

        def slowly(*args: Any) -> None:
            own.copies.send = send
            time.sleep(self.seconds)
            send(*args)

        own.copies.send = slowly


def tell(pipe: ps.Pipeline, job: Any) -> None:
    pipe._workers._run([job] * len(pipe.members))  # type: ignore[attr-defined]


def arm(worker: int, is_sent: bool) -> Event:
    return lambda pipe: tell(pipe, Arm(worker, is_sent))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_replica_after_the_other_dies(tmp_path: Path) -> None:
    events = {1: set_trap("step"), 2: arm(1, True), 3: send(0), 4: arm(0, False)}
    pipe = check(tmp_path, events, replicas=2, on_failure="replace", counts=False)
    assert (pipe.members.number, pipe.plan.replicas) == (4, 2)


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
def test_batches_of_map_that_were_under_way_as_weights_changed(tmp_path: Path) -> None:
    processes.check_training_amid_map(tmp_path, workers=HERE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_forward_that_is_run_again_finds_the_model_as_it_was() -> None:
    processes.check_a_forward_again(workers=HERE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_if_an_actor_has_died_before_the_pipeline_is_closed() -> None:
    def trained(dies: bool) -> list[torch.Tensor]:
        model = plain_layers()
        with make(model, on_failure="replace") as pipe:
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
            step(pipe)
            optimizer.step()
            if dies:
                send(1)(pipe)
        state = [v for own in optimizer.state_dict()["state"].values() for v in own.values()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.clone() for t in (*model.state_dict().values(), *state, *gradients)]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_has_changed_is_in_a_copy_or_in_the_log_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)  # copies are made where they have to be
    model = plain_layers()
    with make(model, on_failure="replace") as pipe:
        kept = pipe._workers._copying  # type: ignore[attr-defined]
        pool = pipe._workers._pool  # type: ignore[attr-defined]
        step(pipe)  # is followed by a copy of everything
        assert kept.works == []
        model.zero_grad()
        model.eval()
        before = pool.copies
        list(pipe.map([X] * 6, ahead=3))
        assert len(kept.works) == 1  # the gradients that are gone
        pipe.fetch()
        list(pipe.map([X] * 2))
        assert len(kept.works) == 1
        model.train()
        step(pipe)
        assert (len(kept.works), pool.copies) == (2, before)
        model.eval()
        model[0].marked = 1.0
        list(pipe.map([X] * 2))
        assert (len(kept.works), pool.copies) == (0, before + 1)
        kept._most = 0  # bytes that the log may have
        step(pipe)
        step(pipe)
        assert pool.copies == before + 2
        model.train()
        list(pipe.map([X] * 6, ahead=3))
        assert pool.copies >= before + 4
        assert len(kept.works) <= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_deaths_while_batches_of_map_are_under_way() -> None:
    processes.check_two_deaths_amid_map(workers=HERE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_are_read_from_those_that_take_over() -> None:
    """Nobody has died; the workers were parted by an impatient Ctrl-C, say."""

    def trained(fails: bool) -> list[torch.Tensor]:
        model = plain_layers()
        with make(model, on_failure="replace") as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            found: list[torch.Tensor] = []
            for read in (pipe.state_dict, lambda: pipe.fetch() or model.state_dict()):
                step(pipe)
                optimizer.step()
                if fails:
                    pipe._workers._pool.fail("an interrupt")  # type: ignore[attr-defined]
                found += [value.clone() for value in read().values()]
            assert pipe.members.number == 2 * fails
        return found

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    pipe = check(tmp_path, {2: send(0, signal.SIGSTOP)}, on_failure="replace")
    assert "was stopped by a signal" in pipe.history().events[0].what


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["replace", "continue"])
def test_an_actor_that_is_asked_to_end_hands_over(tmp_path: Path, way: str) -> None:
    left: list[Any] = []

    def ask(pipe: ps.Pipeline) -> None:
        left.append(pipe._workers._pool._actors[1])  # type: ignore[attr-defined]
        send(1, signal.SIGTERM)(pipe)

    pipe = check(tmp_path, {2: ask}, on_failure=way)
    (event,) = pipe.history().events
    assert "a worker was asked to end (SIGTERM)" in event.what
    with pytest.raises(ray().exceptions.RayActorError, match=r"INTENDED_USER_EXIT|exit_actor"):
        ray().get(left[0].look.remote())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_actor_dies_as_another_was_asked_to_end(tmp_path: Path) -> None:
    events = {2: send(1, signal.SIGTERM), 3: send(0)}
    pipe = check(tmp_path, events, on_failure="replace", devices=["cpu"] * 3)
    assert len(pipe.members) == 3


LOSSES = [F.mse_loss, F.l1_loss, F.smooth_l1_loss]


def eventful(pipe: ps.Pipeline, at: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """What a script may do between and in steps; `at` is called before each, with its name."""
    torch.manual_seed(11)
    model = pipe.model
    every = list(model.parameters())
    early, late = every[:-4], every[-4:]
    optimizer = pipe.optimizer(torch.optim.AdamW, early, lr=0.01)
    scaler = pipe.scaler(init_scale=8.0, growth_interval=2)
    found = {}
    for k in range(4):
        at(f"{k} pass")
        found[f"pass {k}"] = pipe.train_step(X, target=Y, loss_fn=LOSSES[k % 3], scaler=scaler)
        model.train(k != 1)
        at(f"{k} second pass")
        found[f"second {k}"] = pipe.train_step(Y, target=X, loss_fn=LOSSES[-k % 3], scaler=scaler)
        at(f"{k} unscale")
        scaler.unscale_(optimizer)
        at(f"{k} clip value")
        pipe.clip_grad_value_(0.05)
        at(f"{k} clip")
        found[f"norm {k}"] = pipe.clip_grad_norm_(0.1)
        if k == 1:
            optimizer.add_param_group({"params": late, "lr": 0.02})
        at(f"{k} step")
        scaler.step(optimizer)
        scaler.update()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        model.train()
        if k == 1:
            found["evaluated"] = pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        if k == 2:
            at("fetch")
            pipe.load_state_dict({n: t * 0.5 for n, t in pipe.state_dict().items()}, strict=False)
            at("load")
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=k != 1)
    for number, own in optimizer.state_dict()["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in own.items()}
    found["scale"] = torch.tensor(scaler.get_scale())
    return found | {name: value.clone() for name, value in pipe.state_dict().items()}


def plain_layers() -> nn.Module:
    torch.manual_seed(2)
    layers = [[nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1)] for _ in "abc"]
    return nn.Sequential(*(layer for each in layers for layer in each))


KILLED: dict[str, Event] = {
    "0 second pass": send(0),
    "1 unscale": send(1),
    "1 step": send(0),
    "2 clip": send(1),
    "3 pass": send(0),
}
DEATHS: dict[str, tuple[float, dict[str, Event]]] = {
    "and all since the first copy is done again": (0.0, KILLED),
    "and there are copies before passes": (math.inf, KILLED),
    "before its copy is sent": (
        math.inf,
        {
            "0 pass": arm(0, False),
            "1 second pass": arm(1, False),
            "2 pass": arm(0, False),
            "load": arm(1, False),
            "3 second pass": arm(0, False),
        },
    ),
    "when its copy has been sent": (
        math.inf,
        {
            "0 second pass": arm(1, True),
            "1 second pass": arm(0, True),
            "2 second pass": arm(1, True),
            "load": arm(0, True),
            "3 second pass": arm(1, True),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", DEATHS)
def test_what_is_lost_is_done_again_with_what_it_was_given(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(plain_layers(), workers="threads", threads_per_worker=1) as pipe:
        wanted = eventful(pipe, lambda moment: None)
    share, events = DEATHS[when][0], dict(DEATHS[when][1])
    monkeypatch.setattr(copying, "_SHARE", share)
    count = len(events)
    with make(plain_layers(), on_failure="replace") as pipe:
        found = eventful(pipe, lambda moment: events.pop(moment, lambda pipe: None)(pipe))
        assert (events, pipe.members.number) == ({}, count)
        stale = pickled(Change(10**6, 0, None, {}, []))
        actor = pipe._workers._pool._actors[0]  # type: ignore[attr-defined]
        assert ray().get([actor.hold.remote(k, 1, stale) for k in (0, count)]) == [False, True]
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def train_with_events(
    pipe: ps.Pipeline, events: dict[int, Event], count: int = 5
) -> dict[str, torch.Tensor]:
    """All that has come of some steps; each event is before one of them."""
    torch.manual_seed(11)
    optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
    found = {}
    for k in range(count):
        optimizer.zero_grad()
        events.get(k, lambda _: None)(pipe)
        found[f"loss {k}"] = step(pipe)
        optimizer.step()
    for number, own in optimizer.state_dict()["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in own.items()}
    return found | {name: value.clone() for name, value in pipe.state_dict().items()}


def compare(
    train: Callable[[ps.Pipeline, bool], dict[str, torch.Tensor]],
    build: Callable[[], nn.Module],
    deaths: int,
) -> None:
    """Actors, of whom so many die, get the bits of threads, of whom none does."""
    with make(build(), workers="threads", threads_per_worker=1) as pipe:
        wanted = train(pipe, False)
    with make(build(), on_failure="replace") as pipe:
        found = train(pipe, True)
        assert pipe.members.number == deaths
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_dies_while_what_is_lost_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)
    with make(plain_layers(), workers="threads", threads_per_worker=1) as pipe:
        wanted = train_with_events(pipe, {})
    counts: list[int] = []
    redo = Runner.redo

    def disturbed(self: Runner, works: Sequence[Work]) -> None:
        counts.append(len(works))
        if len(counts) == 1:
            redo(self, works[:3])
            os.kill(self.workers.members[0].pid, signal.SIGKILL)
            redo(self, works[3:])
        redo(self, works)

    monkeypatch.setattr(Runner, "redo", disturbed)
    with make(plain_layers(), on_failure="replace") as pipe:
        found = train_with_events(pipe, {4: send(1)})
    assert counts[0] == counts[1] > 3
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_lost_is_done_again_with_the_attributes_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script sets one, and writes a weight, before the pass at which the death is noticed."""
    monkeypatch.setattr(copying, "_SHARE", 0.0)

    def change(pipe: ps.Pipeline) -> None:
        pipe.model[3].p = 0.5  # type: ignore[index]
        pipe.model.eval()
        pipe.model[3].train()  # type: ignore[index]

        with torch.no_grad():
            pipe.model[0].weight.mul_(0.5)  # type: ignore[index]

    def die(pipe: ps.Pipeline) -> None:
        pipe.fetch()
        send(1)(pipe)
        time.sleep(0.5)
        change(pipe)

    def train(pipe: ps.Pipeline, dies: bool) -> dict[str, torch.Tensor]:
        return train_with_events(pipe, {4: die if dies else change}, 6)

    compare(train, plain_layers, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_state_that_is_loaded_after_a_death_is_not_there_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)

    def train(pipe: ps.Pipeline, dies: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(11)
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        for k in range(6):
            optimizer.zero_grad()
            step(pipe)
            optimizer.step()
            if k == 0:
                early = copy.deepcopy(optimizer.state_dict())
                for own in early["state"].values():
                    own["exp_avg"].mul_(-2)
        if dies:
            send(1)(pipe)
        optimizer.load_state_dict(early)
        step(pipe)
        optimizer.step()
        return {name: value.clone() for name, value in pipe.state_dict().items()}

    compare(train, plain_layers, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_backwards_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)

    def train(pipe: ps.Pipeline, dies: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(11)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for k in range(4):
            optimizer.zero_grad()
            out = pipe(X)
            F.mse_loss(out, Y).backward(retain_graph=k > 0)
            if dies and k == 2:
                send(0)(pipe)
            if k > 0:
                out.sum().backward()
            if dies and k == 3:
                send(1)(pipe)
            optimizer.step()
        return {name: value.clone() for name, value in pipe.state_dict().items()}

    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    compare(train, lambda: copy.deepcopy(layers), 2)


def keep_a_lock(module: nn.Module, *_: Any) -> None:
    if threading.main_thread().name != "the script":
        module.held = threading.Lock()  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("why", ["no plan", "a lock"])
def test_the_script_has_the_last_copy_if_nobody_takes_over(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)
    monkeypatch.setattr(threading.main_thread(), "name", "the script")

    def best(*_: Any) -> ps.Plan:
        raise ps.PlanError("no plan fits")

    model = plain_layers()
    if why == "a lock":
        model[2].register_forward_hook(keep_a_lock)
    with make(model, on_failure="continue") as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()  # is followed by a copy of the state, and is in the log
        pipe.fetch()
        after = {name: value.clone() for name, value in model.state_dict().items()}
        step(pipe)
        if why == "no plan":
            monkeypatch.setattr(Fallbacks, "best", best)
        send(1)(pipe)
        with pytest.raises(ps.PenstockError, match=r"\(passes: 1; other work, .*: 1\)"):
            step(pipe)
        assert torch.equal(model[1].running_mean, after["1.running_mean"])
        assert not torch.equal(model[0].weight, after["0.weight"])
        assert torch.equal(model[0].weight, plain_layers()[0].weight)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_lost_is_said_if_nobody_can_do_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SHARE", 0.0)
    model = plain_layers()
    with make(model, on_failure="replace", workers=ps.Ray(cpus=1, wait=1.0)) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        step(pipe)
        pipe.fetch()
        copied = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            optimizer.step()  # there is a copy as its parts are new
            step(pipe)
        monkeypatch.setattr(Cluster, "placed", lambda *_: {})  # as if the node had gone
        send(0)(pipe)
        with pytest.raises(ps.InputError, match=r"\(passes: 2; other work, .*: 2\)"):
            step(pipe)
    found = model.state_dict()
    assert [name for name in copied if not torch.equal(copied[name], found[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fewer_and_fewer_go_on_and_then_more_again(tmp_path: Path) -> None:
    """With accumulated gradients, a checkpoint, and what the script fetches in between."""

    def train(pipe: ps.Pipeline, disturb: bool) -> dict[str, torch.Tensor]:
        model = pipe.model
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        pipe.load_random_state({"seed": 5, "trained": 0, "others": 0})
        events: dict[int, Event] = {1: arm(2, False), 3: arm(0, False)} if disturb else {}
        found = {}
        for k in range(8):
            events.get(k, lambda _: None)(pipe)
            found[f"loss {k}"] = step(pipe)
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
            if disturb and k == 4:
                assert len(pipe.members) == 1
                pipe.resize(["cpu"] * 2)
                send(0)(pipe)
            if disturb and k == 5:
                assert len(pipe.members) == 1
                pipe.save(tmp_path / "checkpoint", optimizer=optimizer)
                pipe.resize(["cpu"] * 2)
            if k == 6:
                pipe.fetch()
                found |= {f"{name} then": t.clone() for name, t in model.state_dict().items()}
        return found | {name: t.clone() for name, t in pipe.state_dict().items()}

    with make(plain_layers(), workers="threads", threads_per_worker=1) as pipe:
        wanted = train(pipe, False)
    with make(plain_layers(), devices=["cpu"] * 3, on_failure="continue") as pipe:
        found = train(pipe, True)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    model = plain_layers()
    with make(model, workers="threads", threads_per_worker=1) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        ps.load(tmp_path / "checkpoint").restore(pipe, optimizer=optimizer)
        losses = []
        for k in (6, 7):
            losses.append(step(pipe))
            if k == 7:
                optimizer.step()
        assert torch.equal(losses[0], wanted["loss 6"])
        assert torch.equal(losses[1], wanted["loss 7"])
        assert all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())


def interrupt(pipe: ps.Pipeline) -> None:
    """A step with a Ctrl-C while copies are sent, as the script has set an attribute."""
    pipe.model[0].marked = 1.0  # type: ignore[index]
    tell(pipe, Slow(3.0))
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    try:
        step(pipe)
    finally:
        timer.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ctrl_c_while_copies_are_sent_undoes_the_pass() -> None:
    with make(plain_layers(), on_failure="replace") as pipe:
        state = pipe.random_state()
        wanted = step(pipe)
        gradients = pipe.gradients()
        with pytest.raises(KeyboardInterrupt):
            interrupt(pipe)
        after = pipe.gradients()
        assert gradients.keys() == after.keys()
        assert all(torch.equal(gradient, after[name]) for name, gradient in gradients.items())
        assert "KeyboardInterrupt came at the end of train_step" in pipe.history().events[0].what
        pipe.load_random_state(state)
        for parameter in pipe.model.parameters():
            parameter.grad = None
        pipe.model.load_state_dict(plain_layers().state_dict())
        assert torch.equal(step(pipe), wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ctrl_c_that_ends_the_pipeline_loses_nothing() -> None:
    def train(pipe: ps.Pipeline) -> None:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        step(pipe)
        optimizer.step()

    wanted, model = plain_layers(), plain_layers()
    with make(wanted, workers="threads", threads_per_worker=1) as pipe:
        pipe.load_random_state({"seed": 5, "trained": 0, "others": 0})
        train(pipe)

    def end() -> None:
        with make(model, on_failure="replace") as pipe:
            pipe.load_random_state({"seed": 5, "trained": 0, "others": 0})
            train(pipe)
            interrupt(pipe)

    with pytest.raises(KeyboardInterrupt):
        end()
    pairs = zip(model.state_dict().values(), wanted.state_dict().values(), strict=True)
    assert all(torch.equal(found, value) for found, value in pairs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attributes_that_the_script_sets_after_a_forward_did(tmp_path: Path) -> None:
    model = built(tmp_path)
    with make(model, on_failure="replace") as pipe:
        step(pipe)
        model.trap.calls = 100
        set_trap("backward")(pipe)
        step(pipe)
        pipe.resize(["cpu"])  # which brings what modules remember
        assert (pipe.members.number, model.trap.calls) == (2, 100 + COUNT)


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
        assert "No remaining worker has a copy of what worker" in str(caught.value)
        with pytest.raises(ps.ClosedError, match="has what was last fetched"):
            step(pipe)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_without_room_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_layers()
    with make(model, on_failure="replace", workers=ps.Ray(cpus=1, wait=1.0)) as pipe:
        step(pipe)
        before = {name: gradient.clone() for name, gradient in pipe.gradients().items()}
        monkeypatch.setattr(Cluster, "placed", lambda *_: {})  # as if the node had gone
        send(0)(pipe)
        with pytest.raises(ps.InputError, match=r"no room for 1 others .*The model has its weight"):
            step(pipe)
        with pytest.raises(ps.ClosedError):
            step(pipe)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(torch.equal(g, found[name]) for name, g in before.items())  # type: ignore[arg-type]


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
        found = pipe._workers._run([_copies_of] * 2)  # type: ignore[attr-defined]
        assert found == [(-1, False)] * 2


def _copies_of(own: Any) -> tuple[int, bool]:
    return own.copies.taken.number, bool(own.copies._own._copies)
