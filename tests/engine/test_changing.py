"""What forwards change, in replicas on several devices: read and written as on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from tests.interleavings.cases import Case
from tests.interleavings.running import _move, one_core, plan_of
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()
LOSS = nn.functional.mse_loss
DEVICES = ("sim:0", "sim:1")
Found = dict[str, Tensor]


def held(model: nn.Module) -> Found:
    """Gradients, weights and buffers."""
    found = {n: p.detach() for n, p in (*model.named_parameters(), *model.named_buffers())}
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | grads


def differing(
    build: Callable[[], nn.Module],
    use: Callable[[ps.Pipeline, list[Tensor]], Found],
    case: Case,
    seed: int = 1,
    microbatches: int = 4,
    closed: tuple[str, ...] = (),
) -> list[str]:
    """What has other bits than on one device."""
    found = []
    for devices in (case.devices[:1], case.devices):
        alone = Case(build, (), devices=devices, recompute=case.recompute)
        own = alone if len(devices) == 1 else case
        with simulated(Machine(4, seed)), one_core():
            torch.manual_seed(3)
            model = build()
            _move(model, torch.device(devices[0]))
            xs = [torch.randn(2 * microbatches, 6).to(devices[0]) for _ in range(5)]
            program = ps.capture(model, (xs[0],), keep_closed=list(closed))
            with ps.Pipeline(
                model,
                (xs[0],),
                devices=devices,
                plan=plan_of(own, program, microbatches),
                program=program,
                workers="threads",
                threads_per_worker=1,
                audit=None,
                progress=None,
                merge="rows",
            ) as pipe:
                found.append(use(pipe, xs) | held(model))
                found[-1] = {name: value.cpu() for name, value in found[-1].items()}
    one, several = found
    assert one.keys() == several.keys()
    return [name for name, value in one.items() if not torch.equal(value, several[name])]


def two(build: Callable[[], nn.Module]) -> Case:
    return Case(build, (), devices=DEVICES, replicas=2)


def trained(pipe: ps.Pipeline, xs: list[Tensor]) -> Found:
    """Three steps."""
    found = {}
    for k, x in enumerate(xs[:3]):
        pipe.model.zero_grad()
        found[f"loss {k}"] = pipe.train_step(x, target=x, loss_fn=LOSS)
    return found


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize("devices", [DEVICES, ("cpu", "cpu")], ids=["simulated", "CPUs"])
def test_a_frozen_norm_that_runs_again_reads_its_statistics(devices: tuple[str, str]) -> None:
    def use(pipe: ps.Pipeline, xs: list[Tensor]) -> Found:
        found = trained(pipe, xs)
        pipe.model[1].eval()
        return found | {f"frozen, {name}": value for name, value in trained(pipe, xs).items()}

    case = Case(normed, (), devices=devices, replicas=2, recompute=True)
    assert differing(normed, use, case) == []


class Limited(nn.Module):
    """Its weight is changed in a forward: rows that are too long are made shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, 6, max_norm=0.5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table((x.abs() * 3).long().clamp(0, 10)).sum(1))


def test_a_parameter_that_forwards_change() -> None:
    assert differing(Limited, trained, two(Limited)) == []


class Read(nn.Module):
    """In evaluation mode statistics are read without a call of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(x) if self.training else x - self.norm.running_mean)


def test_statistics_that_are_read_outside_of_the_norm() -> None:
    def use(pipe: ps.Pipeline, xs: list[Tensor]) -> Found:
        found = {}
        for k, x in enumerate(xs[:3]):
            pipe.eval()
            with torch.no_grad():
                found[f"evaluated {k}"] = pipe(x)
                pipe.model.norm.running_mean.add_(k)
            pipe.train()
            found[f"loss {k}"] = pipe.train_step(x, target=x, loss_fn=LOSS)
        return found

    assert differing(Read, use, two(Read)) == []


def test_an_evaluation_under_way_reads_what_was_there_before_the_next_step() -> None:
    def use(pipe: ps.Pipeline, xs: list[Tensor]) -> Found:
        found = {"loss": pipe.train_step(xs[0], target=xs[0], loss_fn=LOSS)}
        pipe.eval()
        mapped = pipe.map(xs[:3])
        found["mapped 0"] = next(mapped)
        time.sleep(0.1)  # threads have given all of it to their devices
        pipe.train()
        found["another loss"] = pipe.train_step(xs[1], target=xs[1], loss_fn=LOSS)
        return found | {f"mapped {k}": result for k, result in enumerate(mapped, 1)}

    def deep() -> nn.Module:
        return nn.Sequential(
            *(m for _ in range(2) for m in (nn.Linear(6, 6), nn.Tanh())), *normed()
        )

    assert [differing(deep, use, two(deep), seed) for seed in range(4)] == [[]] * 4


class Bank(nn.Module):
    """As a container it is empty, and so false."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(6))
        self.inner = nn.Linear(6, 6)

    def __len__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) + self.bank
        with torch.no_grad():
            self.bank.mul_(0.5).add_(0.1)
        return y


def banked() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Bank(), nn.Tanh(), nn.Linear(6, 6))


def test_a_module_that_is_false() -> None:
    cases: Any = [differing(banked, trained, two(banked), s, closed=("2",)) for s in range(4)]
    assert cases == [[]] * 4


class Coded(nn.Module):
    """A buffer is read and changed outside of all calls, and there is a norm in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(6))
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.code
        with torch.no_grad():
            self.code.mul_(0.5).add_(0.1)
        x = torch.tanh(self.second(x))
        return self.last(self.norm(torch.tanh(self.third(x))))


def test_stages_of_a_worker_do_not_overwrite_what_others_change() -> None:
    devices = ("sim:0", "sim:1", "sim:2", "sim:3")
    case = Case(Coded, (6, 8, 10), devices=devices, replicas=2, schedule="interleaved")

    def use(pipe: ps.Pipeline, xs: list[Tensor]) -> Found:
        last = pipe.plan.stages[-1].device
        losses = [pipe.train_step(x, target=x.to(last), loss_fn=LOSS) for x in xs[:3]]
        return {f"loss {k}": loss for k, loss in enumerate(losses)}

    assert [differing(Coded, use, case, seed, 6) for seed in range(4)] == [[]] * 4
