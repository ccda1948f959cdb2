"""Replicas on several devices: how their gradients are added on the first one's."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.engine.gathered import GatheredSum
from penstock.engine.turns import LocalTurns
from penstock.engine.twins import Sent
from tests.interleavings.cases import Case
from tests.interleavings.mutations import Mutation
from tests.interleavings.running import _move, _own_streams, plan_of
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()
LOSS = nn.functional.mse_loss
DEVICES = ("sim:0", "sim:1")
WIDTH = 64


def wide() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def images() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))
    return model.to(memory_format=torch.channels_last)


def piped(model: nn.Module, x: torch.Tensor, microbatches: int, case: Case) -> ps.Pipeline:
    program = ps.capture(model, (x,))
    return ps.Pipeline(
        model,
        (x,),
        devices=case.devices,
        plan=plan_of(case, program, microbatches),
        program=program,
        workers="threads",
        audit=None,
        progress=None,
    )


class Ahead(Machine):
    """Its devices do nothing before somebody waits for them: the process is far ahead."""

    def _go_on(self) -> None:
        return


def peaks(microbatches: int) -> list[int]:
    """The most bytes that each of two devices has, with a replica on each, in the third step."""
    machine = Ahead(2)
    with simulated(machine), mock.patch("penstock.engine.gathered.BUCKET", WIDTH * WIDTH):
        model = wide().to("sim:0")
        x = torch.randn(microbatches, WIDTH, device="sim:0")
        with piped(model, x, microbatches, Case(wide, (), devices=DEVICES, replicas=2)) as pipe:
            for _ in range(3):
                model.zero_grad()
                machine.run_all()
                machine.peak = list(machine.allocated)
                pipe.train_step(x, target=x, loss_fn=LOSS)
        return machine.peak


def test_memory_does_not_grow_with_the_micro_batches_under_way() -> None:
    few, many = peaks(2), peaks(12)
    weights = sum(p.nbytes for p in wide().parameters())
    home, other = (after - before for before, after in zip(few, many, strict=True))
    assert home < 2 * weights  # gradients of two micro-batches wait for those before
    assert other < weights


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("after", [False, True], ids=["hook", "hook after accumulation"])
def test_hooks_see_one_micro_batch_after_the_other(after: bool, seed: int) -> None:
    """They are called in the order of micro-batches, with the sums so far."""
    found = []
    for devices in (DEVICES[:1], DEVICES):
        with simulated(Machine(2, seed)):
            model, seen = wide().to(devices[0]), list[torch.Tensor]()
            x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(devices[0])
            with piped(model, x, 4, Case(wide, (), devices=devices, replicas=len(devices))) as pipe:
                weight: Any = model[1].weight
                if after:
                    weight.register_post_accumulate_grad_hook(
                        lambda p, seen=seen: seen.append(p.grad.clone())
                    )
                else:
                    weight.register_hook(lambda g, seen=seen: [seen.append(g.clone()), 2 * g][1])
                pipe.train_step(x, target=x, loss_fn=LOSS)
            found.append([t.cpu() for t in (*seen, *(p.grad for p in model.parameters()))])
    one, two = found
    assert len(one) == len(two) == 4 + 8
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def broken_off(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients before a step that fails, and after it, the script working on other streams."""

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no")
        return LOSS(output, target)

    calls: list[int] = []
    case = Case(wide, (), devices=DEVICES, replicas=2, own_streams=True)
    with simulated(Machine(2, seed)):
        model = wide()
        _move(model, torch.device("sim:0"))
        x = torch.randn(4, WIDTH, device="sim:0")
        with piped(model, x, 4, case) as pipe, _own_streams(case):
            pipe.train_step(x, target=x, loss_fn=LOSS)
            for parameter in model.parameters():
                parameter.grad.mul_(3.0)
            before = [p.grad.cpu() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.grad.mul_(1.0)
            with pytest.raises(ps.WorkerError, match="in the loss"):
                pipe.train_step(x, target=x, loss_fn=failing)
            return before, [p.grad.cpu() for p in model.parameters()]


def test_a_step_that_fails_leaves_the_gradients_of_the_one_before() -> None:
    for seed in range(6):
        before, after = broken_off(seed)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_copies_for_undoing_are_made_before_workers_begin() -> None:
    """Otherwise the script's stream still copies gradients while they are being added to."""
    lines = [
        (
            "        backups = self._before_replicas(order)\n"
            "        handover = Handover(self._with_streams)\n",
            "        handover = Handover(self._with_streams)\n"
            "        backups = self._before_replicas(order)\n",
        )
    ]
    uses = ["penstock.workers.threads.backend.ThreadWorkers"]
    with Mutation("penstock.workers.threads.workers", lines, uses, []).made():
        pairs = [broken_off(seed) for seed in range(12)]
    assert not all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


def test_a_step_that_fails_leaves_no_work_on_memory_that_is_free() -> None:
    """What the script then puts on the default stream may have the memory of gradients."""
    at_work = threading.Event()

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.device.index == 1:
            at_work.set()
        elif at_work.wait(10) and len(calls) == 2:
            time.sleep(0.1)  # meanwhile the other replica sends its gradients
            raise ValueError("no")
        else:
            calls.append(1)
        return LOSS(output, target)

    case = Case(wide, (), devices=DEVICES, replicas=2, own_streams=True)
    for seed in range(6):
        calls: list[int] = []
        with simulated(Ahead(2, seed)) as machine:
            model = wide()
            _move(model, torch.device("sim:0"))
            x = torch.randn(6, WIDTH, device="sim:0")
            with piped(model, x, 6, case) as pipe:
                with _own_streams(case):
                    pipe.train_step(x, target=x, loss_fn=LOSS)
                    model.zero_grad()
                    machine.run_all()
                    with pytest.raises(ps.WorkerError, match="in the loss"):
                        pipe.train_step(x, target=x, loss_fn=failing)
                made = [torch.full((WIDTH, WIDTH), float(k), device="sim:0") for k in range(40)]
                machine.run_all()
                for k, tensor in enumerate(made):
                    assert torch.equal(tensor.cpu(), torch.full((WIDTH, WIDTH), float(k)))


class Elsewhere:
    """Stands for twins, and for who adds their gradients: knows what was sent and waited for."""

    def __init__(self) -> None:
        self.done: list[tuple[torch.Size, ...]] = []

    def send(self, terms: Any) -> Sent:
        gradients = [gradient for _, gradient in terms]
        return Sent([leaf for leaf, _ in terms], gradients, Any, gradients)

    def add(self, sent: Sent, accumulate: Any) -> None:
        return None

    def wait_before_reuse(self, sent: Sent, added: Any) -> None:
        self.done.append(tuple(leaf.shape for leaf in sent.leaves))


def sent_by(leaves: list[torch.Tensor], result: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The shapes of what is sent in a backward, and what is let go of before the next one."""
    elsewhere: Any = Elsewhere()
    total = GatheredSum(LocalTurns(), elsewhere, elsewhere)
    with total.sending(leaves) as early:
        found = torch.autograd.grad(result, leaves)
    terms = [(p, g) for p, g in zip(leaves, found, strict=True) if id(p) not in early.leaves]
    sent = [*early.sent, *([total.send(terms)] if terms else [])]
    total.add(0, sent)
    total.let_go()
    return [tuple(leaf.shape for leaf in each.leaves) for each in sent], elsewhere.done


def test_buckets_are_sent_as_they_are_full_and_the_last_one_is_kept() -> None:
    with mock.patch("penstock.engine.gathered.BUCKET", 4 * 16):
        large, small, last = (torch.zeros(n, requires_grad=True) for n in (20, 10, 6))
        sent, done = sent_by([large, small, last], (large.sum() * small.sum() * last.sum()).exp())
        assert sorted(map(len, sent)) == [1, 2]
        assert done == sent[:-1]
        few = torch.zeros(3, requires_grad=True)
        assert sent_by([few], few.sum()) == ([(few.shape,)], [])


@pytest.mark.parametrize("rows", [10, 10_000])
def test_sparse_gradients_are_sent(rows: int) -> None:
    with mock.patch("penstock.engine.gathered.BUCKET", 1000):
        weight = nn.Embedding(rows, 4).weight
        found = nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True)
        assert sent_by([weight], found.sum())[0] == [(weight.shape,)]


def test_gradients_have_the_strides_of_one_device() -> None:
    found = []
    for devices in (DEVICES[:1], DEVICES):
        with simulated(Machine(2, 1)):
            model = images().to(devices[0])
            x = torch.linspace(-1, 1, 4 * 72).reshape(4, 2, 6, 6).to(devices[0])
            case = Case(images, (), devices=devices, replicas=len(devices))
            with piped(model, x, 4, case) as pipe:
                pipe.train_step(x, target=torch.zeros(4, 3, 2, 2), loss_fn=LOSS)
            found.append([p.grad for p in model.parameters()])
            strides = [gradient.stride() for gradient in found[-1]]
            found[-1] = [(s, g.cpu()) for s, g in zip(strides, found[-1], strict=True)]
    for (stride, gradient), (other, there) in zip(*found, strict=True):
        assert stride == other
        assert torch.equal(gradient, there)
