"""What every kind of workers has to do: each clause is a function of a kind.

Clauses use nothing but `penstock/workers/backend.py`. Under torchrun every rank runs them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.phases import timeline_of
from penstock.plan.passes import schedule_of_pass
from penstock.schedule import Kind
from penstock.storage.part import Part
from penstock.training.dividing import Dividing
from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.backend import Backend, WorkerKind, Workers
from penstock.workers.clipping import Clipping
from penstock.workers.saving import Portion, SaveOrder
from tests.support.models import uniform_plan
from tests.support.traps import divide
from tests.workers.contract.rig import (
    COUNT,
    PARTS,
    STAGES,
    Forked,
    Later,
    Rig,
    X,
    backend_of,
    same,
    touch_and_wait,
    wait_for,
)

Clause = Callable[[WorkerKind], None]
CLAUSES: dict[str, Clause] = {}
"""By name."""
FAR = 220
"""Messages for which no link between processes has room at once."""


def clause(function: Clause) -> Clause:
    """One of them."""
    CLAUSES[function.__name__] = function
    return function


# -- without a plan ---------------------------------------------------------------------------


@clause
def what_a_backend_has(kind: WorkerKind) -> None:
    backend = backend_of(kind)
    assert list(map(str, backend.devices)) == ["cpu"] * STAGES
    assert backend.threads >= 1
    said: list[tuple[int, int, str]] = []
    backend.wait(lambda done, of, what: said.append((done, of, what)))
    backend.wait(None)
    assert all(0 <= done <= of and what for done, of, what in said)
    if backend.leads:
        one, other = backend.devices
        assert backend.probe.copies(one, other) in (True, False)
        assert backend.probe.overlaps(one, other) in (True, False)
        times = backend.probe.one_way(one, other, 1 << 10, 4)
        assert len(times) == 4
        assert min(times) > 0
        assert backend.probe.overhead(one, other) > 0
        assert backend.probe.adding(one, other) >= 0
    with backend.operation("waiting for the one that leads"):
        pass
    backend.close()
    backend.close()


LAYERS = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]


@clause
def a_plan_is_agreed_on(kind: WorkerKind) -> None:
    """It is that of the process that leads; one of another model is refused everywhere."""
    program, other = (ps.capture(nn.Sequential(*layers), (X,)) for layers in (LAYERS, LAYERS[:2]))
    plan, wrong = (uniform_plan(each, STAGES, COUNT) for each in (program, other))
    backend = backend_of(kind)

    def agreed(made: ps.Plan) -> ps.Plan:
        with backend.operation("the planning"):
            return backend.broadcast_plan(program, made if backend.leads else None)

    with pytest.raises(ps.PlanError, match=program.fingerprint):
        agreed(wrong)
    assert agreed(plan) == plan
    fails_everywhere(backend, backend.leads)
    backend.close()


def fails_everywhere(workers: Backend | Workers, here: bool) -> None:
    """See that an operation that fails in one process does so in all."""

    def work() -> None:
        with workers.operation("all of it"), workers.operation("a part of it"):
            if here:
                raise ps.InputError("it cannot be")

    with pytest.raises(ps.InputError, match="it cannot be"):
        work()


# -- what the processes that run the script do together -----------------------------------------


@clause
def an_operation_fails_everywhere(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        workers = rig.workers
        for fails in (workers.role.leads, workers.role.has_loss):
            fails_everywhere(workers, fails)
        rig.train()


@clause
def roles_and_what_all_hear(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        workers, role = rig.workers, rig.workers.role
        with workers.operation("a broadcast"):
            tensor = torch.arange(3) + role.index
            mine = (role.index, tensor) if role.has_inputs else None
            fed = workers.broadcast(mine, "inputs")
        with workers.operation("a broadcast"):
            led = workers.broadcast(role.index if role.leads else None, "leader")
            roles = workers.all_gather("roles", role)
        assert roles[role.index] == role
        assert [each.index for each in roles] == list(range(len(roles)))
        assert [each.index for each in roles if each.leads] == [led]
        assert [each.index for each in roles if each.has_inputs] == [fed[0]]
        assert torch.equal(fed[1], torch.arange(3) + fed[0])
        assert sum(each.has_loss for each in roles) == 1
        assert all(each.has_all_weights for each in roles) == (kind in ("threads", "processes"))
        assert len({each.name for each in roles}) == len(roles)
        tensors = workers.all_gather("tensors", {"x": tensor})
        assert all(torch.equal(t["x"], torch.arange(3) + k) for k, t in enumerate(tensors))
        found = workers.all_gather("homes", [home is not None for home in workers.homes])
        assert [sum(each) for each in zip(*found, strict=True)] == [1] * STAGES
        assert len(workers.devices) == STAGES
        words = r"by reference|copied .*>.*|shared memory( \(\w+\))?|torch\.distributed \(\w+\)"
        assert all(re.fullmatch(words, link) for link in workers.links)
        assert len(workers.links) == STAGES - 1


@clause
def where_the_loss_is_called(kind: WorkerKind) -> None:
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.mse_loss(output, target)

    with Rig(kind) as rig:
        rig.train(loss_fn=loss)
        role = rig.workers.role
        assert len(calls) == (COUNT if role.calls_loss and role.has_loss else 0)


# -- stages and passes ----------------------------------------------------------------------------


@clause
def training_has_the_bits_of_one_device(kind: WorkerKind) -> None:
    """Also when the model was changed in place, and in evaluation mode."""
    with Rig(kind) as rig:
        rig.train(2)
        with torch.no_grad():
            for tensors in (rig.model.state_dict(), rig.twin.state_dict()):
                for tensor in tensors.values():
                    tensor.add_(tensor)
        rig.train()
        for model in (rig.model, rig.twin):
            model.zero_grad()
            model[0].eval()  # type: ignore[operator, union-attr]
            model[1][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        rig.train()
        rig.evaluate(X)


@clause
def replicas_have_the_bits_of_one_device(kind: WorkerKind) -> None:
    """Or they are refused before anything runs."""
    backend = backend_of(kind)
    try:
        backend.check_replicas(2)
    except ps.InputError as error:
        assert "replicas=2" in str(error)  # noqa: PT017 - workers may have them or not
        return
    finally:
        backend.close()

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss")

    with Rig(kind, plain, replicas=2) as rig:
        assert [(m.replica, m.place) for m in rig.workers.members] == [(0, 0), (1, 0)]
        rig.train(2)
        rig.evaluate(X, X + 1)
        with pytest.raises(ps.WorkerError, match="no loss"):
            rig.run("train", loss_fn=fails)
        rig.train(2)


@clause
def who_works_and_at_what(kind: WorkerKind) -> None:
    """A pass runs before it is waited for, and what members do is seen meanwhile."""
    with Rig(kind) as rig:
        members = rig.workers.members
        assert [member.number for member in members] == list(range(STAGES))
        assert sorted((m.replica, m.place) for m in members) == [(0, k) for k in range(STAGES)]
        pids = rig.workers.all_gather("processes", os.getpid())
        assert (members[-1].pid in pids) == (kind in ("threads", "torchrun"))
        folder = rig.folder()
        begun, go = folder / "begun", folder / "go"
        rig.trap(1).arm("forward", partial(touch_and_wait, begun, go))
        ticket = rig.started("train")
        wait_for(begun)
        seen = rig.workers.all_gather("status", dict(rig.workers.status()))
        readings = {k: v for status in seen for k, v in status.items()}
        assert readings.keys() == set(range(STAGES))
        assert readings[1].activity.where == (1, 1, "forward")
        assert not readings[1].activity.waits
        assert readings[1].since > 0
        go.touch()
        ticket.finish()
        assert all(each.activity.is_idle for each in rig.workers.status().values())


@clause
def workers_may_run_far_ahead(kind: WorkerKind) -> None:
    """A stage sends more than a link has room for before its receiver wants the first of it."""
    with Rig(kind, deep, count=FAR, schedule="breadth-first") as rig:
        assert rig.plan.placement == (0, 1, 0, 1)
        rig.train(2)
        order, outcome = rig.forward(rig.x)
        rig.back(order, outcome)


def deep() -> nn.Module:
    """Has two stages for each worker, not all as long."""
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))


@clause
def forwards_alone_and_backwards_alone_have_an_order(kind: WorkerKind) -> None:
    """Which is not what is left of the schedule, where that takes longer."""
    with Rig(kind, deep, count=8, schedule="interleaved") as rig:
        whole = rig.plan.schedule_for(8).workers
        with rig.workers.operation("a call"):
            order = replace(rig.order("forward"), recorded=True)
            ticket = rig.workers.start(order)
        outcome = ticket.finish()
        gradients = outcome.results if rig.workers.role.has_loss else {}
        back = replace(order.back(gradients, order.modes, None), recorded=True)
        with rig.workers.operation("backward"):
            ticket = rig.workers.start(back)
        passes: Any = {"forward": outcome, "backward": ticket.finish()}
        for what, done in passes.items():
            events = sorted(timeline_of(done.logs, 2).events, key=attrgetter("start"))
            ran = tuple(tuple(e.action for e in events if e.worker == w) for w in range(2))
            kind_of_action = Kind.FORWARD if what == "forward" else Kind.BACKWARD
            left = tuple(tuple(a for a in own if a.kind is kind_of_action) for own in whole)
            assert ran == schedule_of_pass(rig.plan, 8, what).workers != left
        for part in rig.x.tensor_split(8):
            output = rig.twin(part)
            output.backward(output.detach())
        rig.compare()


@clause
def several_passes_are_under_way(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        rig.evaluate(*(k * X for k in range(4)))


@clause
def two_batches_wait_for_their_backwards(kind: WorkerKind) -> None:
    """In any order; the one for some parameters leaves the others alone."""
    with Rig(kind, plain) as rig:
        x = X.clone().requires_grad_()
        (order, first), (another, second) = (rig.forward(each) for each in (x, 2 * X))
        wanted = [p for p in rig.workers.parameters if p.ndim == 2]
        rig.back(another, second, wanted)
        of_x = rig.back(order, first).gradients
        y = X.clone().requires_grad_()
        outputs = [[rig.twin(part) for part in each.tensor_split(COUNT)] for each in (y, 2 * X)]
        matrices = [p for p in rig.twin.parameters() if p.ndim == 2]
        for each in outputs[1]:
            each.backward(each.detach(), inputs=matrices)
        for each in outputs[0]:
            each.backward(each.detach())
        rig.compare()
        for outcome, expected in zip((first, second), outputs, strict=True):
            assert all(torch.equal(a, b) for (a,), b in zip(outcome.parts, expected, strict=True))
        if rig.workers.role.has_inputs:
            rows = torch.cat([of_x[k][0] for k in range(COUNT)])
            assert torch.equal(rows, y.grad)


def plain() -> nn.Module:
    """Without masks."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)))


@clause
def what_is_forgotten_is_gone(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        order, outcome = rig.forward(X)
        rig.workers.forget(order.training, order.number)
        with pytest.raises((KeyError, ps.PenstockError)):
            rig.back(order, outcome)
        rig.twin.load_state_dict(rig.workers.state(rig.model, rig.model))
        rig.train()


@clause
def every_action_is_timed(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        with rig.workers.operation("a step"):
            ticket = rig.workers.start(replace(rig.order("train"), recorded=True))
        events = timeline_of(ticket.finish().logs, 2).events
        actions = [a for worker in rig.plan.schedule_for(COUNT).workers for a in worker]
        assert sorted(event.action for event in events) == sorted(actions)
        begun = {event.action: event.start for event in events}
        for action in actions:  # one clock for all
            if action.stage == 1 and action.kind.value == "F":
                assert begun[action] > begun[action._replace(stage=0)]


@clause
def further_ways(kind: WorkerKind) -> None:
    """Each is taken when it is there; micro-batches of one pass may differ, and so may modes."""
    with Rig(kind, Forked) as rig:
        far = torch.cat([PARTS[0], 100 * PARTS[1], PARTS[2]])
        rig.train()
        for x in (X, 100 * X, far, X):
            rig.train(x=x)
            rig.evaluate(x, far)


@clause
def replaced_memory_is_refused_or_used(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        rig.workers.check()
        rig.train()
        for model in (rig.model, rig.twin):
            weight = model[0][0].weight  # type: ignore[index]
            weight.data = 2 * weight.data  # type: ignore[union-attr, operator]
        refused = False
        try:
            rig.workers.check()
        except ps.InputError:
            refused = True
        if not refused:
            rig.train()
            return
        for use in (rig.workers.check, partial(rig.run, "train")):
            with pytest.raises(ps.InputError, match="was given other memory"):
                use()


@clause
def the_model_is_held(kind: WorkerKind) -> None:
    """Its parameters are the same objects, gradients are where the stages are."""
    with Rig(kind) as rig:
        named = dict(rig.model.named_parameters())
        rig.train()
        assert all(p is named[name] for name, p in rig.model.named_parameters())
        held = {id(p) for p in rig.workers.parameters}
        mine = [name for name, p in named.items() if id(p) in held]
        assert all(named[name].grad is not None for name in mine)
        every = rig.workers.all_gather("names", mine)
        assert sorted(name for names in every for name in names) == sorted(named)
        owned = rig.workers.ownership.parameters
        assert [len(each) for each in owned] == [len(named) // STAGES] * STAGES
    rig.model(X).sum().backward()  # and after the workers


# -- parameters -------------------------------------------------------------------------------


def optimizers(rig: Rig, kind: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """One in parts, and a plain one beside it, both in two groups."""
    dividing = Dividing(rig.model)
    dividing.workers = rig.workers
    found: list[torch.optim.Optimizer] = []
    divided = partial(PipelineOptimizer, kind, divide=dividing)
    for model, make in ((rig.model, divided), (rig.twin, kind)):
        flat = [p for p in model.parameters() if p.ndim == 1]
        rest = [p for p in model.parameters() if p.ndim != 1]
        groups = [{"params": flat}, {"params": rest, "weight_decay": 0.3}]
        found.append(make(params=groups, **options))
    return found


@clause
def weights_that_are_used_later(kind: WorkerKind) -> None:
    """An optimizer trains them from then on, and goes on with what it remembers of them."""
    with Rig(kind, Later) as rig:
        both = optimizers(rig, torch.optim.AdamW, lr=0.01)
        remembered = {"exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6), "step": 1.0}
        for step, x in enumerate((X, 100 * X, X, 100 * X)):
            rig.train(x=x)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            rig.compare()
            if step == 0:
                state = both[1].state_dict()
                number = len(state["param_groups"][0]["params"]) - 1  # the bias of the third
                state["state"][number] = {k: torch.as_tensor(v) for k, v in remembered.items()}
                for optimizer in both:
                    optimizer.load_state_dict(copy.deepcopy(state))
        assert_states([optimizer.state_dict() for optimizer in both])


@clause
def an_optimizer_in_parts(kind: WorkerKind) -> None:
    """Its steps, what it remembers, and settings that change, are those of a plain one."""
    with Rig(kind) as rig:
        both = optimizers(rig, torch.optim.AdamW, lr=0.01)
        for step in range(3):
            rig.train()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[1]["lr"] = 0.02 / (1 + step)
            rig.compare()
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in both]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert_states(states)
        for moments in states[1]["state"].values():
            moments["exp_avg"].mul_(2)
        for optimizer in both:
            optimizer.load_state_dict(copy.deepcopy(states[1]))
        rig.train()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        rig.compare()
        assert_states([optimizer.state_dict() for optimizer in both])


def assert_states(states: list[dict[str, Any]]) -> None:
    """They remember the same of the same parameters."""
    ours, theirs = (state["state"] for state in states)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[number], theirs[number]) for number in theirs)


class Warming(torch.optim.SGD):
    """Counts its steps in its groups, in two ways."""

    def __init__(self, params: Any, lr: float, count: int | None = None) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("count", count)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["other"] = group.get("other", 0) + 1
            group["count"] = (group["count"] or 0) + 1
        super().step(closure)


@clause
def settings_that_a_step_changes_are_refused(kind: WorkerKind) -> None:
    """As parts would not share them."""
    with Rig(kind) as rig:
        rig.train()
        mine, _ = optimizers(rig, Warming, lr=0.01)
        mine.step()
        mine, _ = optimizers(rig, Warming, lr=0.01, count=0)
        with pytest.raises(ps.InputError, match=r"has changed 'count' .* pipe.parameters\(\)"):
            mine.step()


@clause
def clipping_has_the_bits_of_torch(kind: WorkerKind) -> None:
    drawn = torch.Generator().manual_seed(4)
    with Rig(kind) as rig:
        rig.train()
        mine = list(zip(rig.model.parameters(), rig.twin.parameters(), strict=True))
        for clipping in [
            *[Clipping(0.5)] * 20,
            Clipping(0.4, float("inf")),
            Clipping(0.3, 0.5, True),
            Clipping(0.2, 1.0, foreach=False),
            Clipping(100.0),
        ]:
            for ours, theirs in mine:
                values = torch.randn(theirs.shape, generator=drawn) * 10
                for parameter in (ours, theirs):
                    if parameter.grad is not None:
                        parameter.grad = values.clone()
            norm = rig.workers.clip([ours for ours, _ in mine], clipping)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(rig.twin.parameters(), *clipping))
            rig.compare()
        for ours, theirs in mine[:1]:
            for parameter in (ours, theirs):
                if parameter.grad is not None:
                    parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            rig.workers.clip([ours for ours, _ in mine], Clipping(1.0, 2.0, True))


def weights_first() -> nn.Module:
    """A module for each stage, of which the last one has no parameters."""
    first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return nn.Sequential(first, nn.Sequential(nn.Tanh(), nn.Sigmoid()))


@clause
def a_stage_without_parameters(kind: WorkerKind) -> None:
    with Rig(kind, weights_first) as rig:
        both = optimizers(rig, torch.optim.SGD, lr=0.5)
        for _ in range(2):
            rig.train()
            ours, theirs = (list(model.parameters()) for model in (rig.model, rig.twin))
            rig.workers.clip_value(ours, 0.01, None)
            nn.utils.clip_grad_value_(theirs, 0.01)
            norm = rig.workers.clip(ours, Clipping(0.02))
            assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 0.02))
            rig.compare()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        rig.compare()


@clause
def states_of_the_model_and_of_a_copy(kind: WorkerKind) -> None:
    with Rig(kind) as rig:
        rig.train()
        doubled = copy.deepcopy(rig.model)
        with torch.no_grad():
            for tensor in doubled.state_dict().values():
                tensor.add_(tensor)
        expected = {name: tensor + tensor for name, tensor in rig.twin.state_dict().items()}
        assert same(rig.workers.state(rig.model, doubled), expected)
        rig.compare()


@clause
def a_checkpoint_in_parts(kind: WorkerKind) -> None:
    """Every tensor is in just one of them, at the moment of the save; or they say why not."""
    with Rig(kind) as rig:
        rig.train()
        optimizer, plain = optimizers(rig, torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer.step()
        plain.step()
        folder = rig.folder()
        names = {id(p): name for name, p in rig.model.named_parameters()}
        for number, background in enumerate([False, True]):
            parts = rig.workers.save(save_order(rig, str(folder), number, background, optimizer))
            expected = {n: t.clone() for n, t in rig.twin.state_dict().items()}
            momenta = {n: plain.state[p] for n, p in rig.twin.named_parameters()}
            rig.train()  # it may be under way
            optimizer.step()
            plain.step()
            tensors: dict[str, torch.Tensor] = {}
            states: dict[str, Any] = {}
            for part in parts:
                assert "error" not in noted(part)
                found = load_file(part.path("model", "safetensors"))
                assert not found.keys() & tensors.keys()
                tensors |= found
                if part.path("optimizer", "pt").exists():
                    states |= torch.load(part.path("optimizer", "pt"))["optimizer"]
            assert same(tensors, expected)
            assert states.keys() == momenta.keys() == set(names.values())
        for index, count in product(range(STAGES), (STAGES, STAGES + 1)):
            Part(str(folder), 2, index, count).workplace.mkdir(exist_ok=True)  # in the way
        rig.workers.all_gather("what is in the way", None)
        parts = rig.workers.save(save_order(rig, str(folder), 2, False, optimizer))
        assert all("cannot be written" in noted(part)["error"] for part in parts)
        rig.workers.all_gather("the end", None)
    shutil.rmtree(folder, ignore_errors=True)


def save_order(rig: Rig, folder: str, number: int, background: bool, optimizer: Any) -> SaveOrder:
    """For a save of all that the workers have."""
    names = {id(p): name for name, p in rig.model.named_parameters()}
    buffers = {id(b): name for name, b in rig.model.named_buffers()}
    held, portions = rig.workers.ownership, []
    here = {id(p) for p in rig.workers.parameters}
    for parameters, others in zip(held.parameters, held.buffers, strict=True):
        tensors = {(names | buffers)[id(t)]: t for t in (*parameters, *others)}
        own = {names[id(p)]: optimizer.state[p] for p in parameters if id(p) in here}
        portions.append(Portion(tensors, {} if optimizer.remote else {"optimizer": own}))
    remote = {"optimizer": optimizer.remote} if optimizer.remote else {}
    return SaveOrder(folder, number, portions, names, remote, background)


def noted(part: Part) -> dict[str, Any]:
    """What a part says of itself, when it is written."""
    wait_for(part.note)
    found: dict[str, Any] = json.loads(part.note.read_text())
    return found


# -- what goes wrong ------------------------------------------------------------------------------


@clause
def a_pass_that_is_given_up(kind: WorkerKind) -> None:
    """Gradients and statistics are as they were, and nobody can wait for it any more."""
    with Rig(kind) as rig:
        rig.train()
        before, counts = rig.now(), copy.copy(rig.runner.counts)
        folder = rig.folder()
        begun, never = folder / "begun", folder / "never"
        rig.trap(1).arm("forward", partial(touch_and_wait, begun, never, 0.3), after=2)
        tickets = [rig.started("train"), rig.started("infer")]
        wait_for(begun)  # two micro-batches have changed what there is to be changed
        with pytest.raises(ps.InputError, match="enough"):
            enough(rig)
        assert same(rig.now(), before)
        for ticket in tickets:
            with pytest.raises(ps.ClosedError):
                ticket.finish()
        assert same(rig.now(), before)
        rig.disarm()
        rig.runner.counts = counts
        rig.train()
        shutil.rmtree(folder, ignore_errors=True)


def enough(rig: Rig) -> None:
    """Give up."""
    with rig.workers.operation("a step"):
        error = ps.InputError("enough")
        rig.workers.give_up(error)
        raise error


@clause
def a_stage_that_fails(kind: WorkerKind) -> None:
    """The error names it, nothing of the pass is left, and the next one is right."""

    def bad_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such class")

    with Rig(kind) as rig:
        rig.train()
        for stage, where in [*product(range(STAGES), ("forward", "backward")), (1, "loss")]:
            before, counts = rig.now(), copy.copy(rig.runner.counts)
            if where != "loss":
                rig.trap(stage).arm(where, divide)
            with pytest.raises(ps.WorkerError) as caught:
                rig.run("train", **({"loss_fn": bad_loss} if where == "loss" else {}))
            error = caught.value
            microbatch = 0 if where == "loss" else 1
            assert (error.stage, error.microbatch, error.action) == (stage, microbatch, where)
            assert isinstance(error.__cause__, KeyError if where == "loss" else ZeroDivisionError)
            assert same(rig.now(), before), (stage, where)
            rig.disarm()
            rig.runner.counts = counts
            rig.train()


@clause
def a_pass_that_fails_among_others(kind: WorkerKind) -> None:
    """Those before it end well, those after it do not."""
    with Rig(kind) as rig:
        rig.model.eval()
        rig.trap(1).arm("forward", divide, after=COUNT)
        tickets = [rig.started("infer") for _ in range(3)]
        assert sorted(tickets[0].finish().results) == list(range(COUNT))
        with pytest.raises(ps.WorkerError, match="stage 1"):
            tickets[1].finish()
        with pytest.raises(ps.ClosedError):
            tickets[2].finish()
        rig.model.train()
        rig.disarm()
        rig.train()


@clause
def a_pass_that_takes_too_long(kind: WorkerKind) -> None:
    """Whoever waits for it hears of that in time. Then all is well again, or closed."""
    with Rig(kind) as rig:
        rig.train()
    with Rig(kind, timeout=1.0) as rig:
        rig.run("train")
        before = rig.now()
        rig.trap(1).arm("forward", partial(time.sleep, 3))
        with pytest.raises((ps.WorkerTimeout, ps.WorkerDied)) as caught:
            rig.run("train")
        assert caught.type is ps.WorkerTimeout or kind == "torchrun"
        assert same(rig.now(), before)
        rig.disarm()
        with suppress(ps.ClosedError, ps.WorkerDied):
            rig.run("train")


@clause
def a_worker_that_ends(kind: WorkerKind) -> None:
    """Where a worker has a process of its own, that is noticed, and nothing goes on."""
    with Rig(kind) as rig:
        assert rig.workers.all_alive()
        if kind in ("processes", "ray"):
            rig.trap(1).arm("forward", partial(os._exit, 3))
            with pytest.raises(
                ps.WorkerDied, match="exit code 3" if kind == "processes" else "died"
            ):
                rig.run("train")
            assert not rig.workers.all_alive()
            with pytest.raises(ps.ClosedError):
                rig.run("train")


@clause
def closing(kind: WorkerKind) -> None:
    """Once is enough, and often does no harm."""
    with Rig(kind) as rig:
        rig.train()
        rig.workers.close()
        rig.workers.close()
        with pytest.raises(ps.ClosedError):
            rig.started("train")
