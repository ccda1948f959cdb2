"""Replicas of stages on several devices of one process: what they follow, and what they refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.engine.twins import _Twin
from tests.interleavings.cases import CASES, Case
from tests.interleavings.running import plan_of
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated
from tests.support.simulated.tensors import SimulatedTensor

install()
LOSS = nn.functional.mse_loss
DEVICES = ("sim:0", "sim:1")


class Counting(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x)


def built(build: Callable[[], nn.Module], devices: tuple[str, ...], **options: Any) -> ps.Pipeline:
    case = Case(build, (), devices=devices, replicas=len(devices))
    model = case.model().to(devices[0])
    x = torch.randn(7, 6, device=devices[0])
    program = ps.capture(model, (x,), **{k: v for k, v in options.items() if k == "keep_closed"})
    return ps.Pipeline(
        model,
        (x,),
        devices=devices,
        plan=plan_of(case, program),
        program=program,
        workers="threads",
        audit=None,
        progress=None,
        **{k: v for k, v in options.items() if k != "keep_closed"},
    )


def stepped(pipe: ps.Pipeline) -> list[torch.Tensor]:
    """The loss and the gradients of a step."""
    x, y = CASES["chain, 1f1b"].batch(0)
    pipe.model.zero_grad()
    loss = pipe.train_step(x, target=y, loss_fn=LOSS)
    grads = [p.grad for p in pipe.model.parameters() if p.grad is not None]
    return [value.cpu() for value in (loss, *grads)]


def chain() -> nn.Module:
    return CASES["chain, 1f1b"].build()


def both(
    change: Callable[[ps.Pipeline], object], build: Callable[[], nn.Module] = chain
) -> list[list[torch.Tensor]]:
    """The same steps on one device and on two, between which something is changed."""
    found = []
    for devices in (DEVICES[:1], DEVICES):
        with simulated(Machine(2, seed=1)), built(build, devices) as pipe:
            first = stepped(pipe)
            with torch.no_grad():
                change(pipe)
            found.append(first + stepped(pipe))
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: pipe.model[0].weight.mul_(2),
        lambda pipe: pipe.model[0].weight.data.mul_(2),
        lambda pipe: pipe.model[2].weight.requires_grad_(False),
        lambda pipe: pipe.model[2].register_forward_hook(lambda m, a, out: out * 3),
        lambda pipe: pipe.model[2].weight.register_hook(lambda gradient: gradient * 3),
    ],
    ids=["in place", "behind its version", "frozen", "hook", "hook of a parameter"],
)
def test_replicas_follow_the_model(change: Callable[[ps.Pipeline], object]) -> None:
    one, two = both(change)
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


class Direct(nn.Module):
    """Its forward reads a parameter itself, and a module has tensors in a list."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), Anchored()
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x) * self.scale)
        return result


class Anchored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.anchors = [torch.arange(6.0), torch.ones(6)]
        self.named = {"one": torch.full((6,), 3.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.anchors[0] * self.weight + self.anchors[1] * self.named["one"]

    def _apply(self, fn: Any, recurse: bool = True) -> Anchored:
        self.anchors = [fn(anchor) for anchor in self.anchors]
        self.named = {name: fn(tensor) for name, tensor in self.named.items()}
        return super()._apply(fn, recurse)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_replicas_follow_parameters_that_forwards_read(is_frozen: bool) -> None:
    """Those that ask for a gradient from now on, and those that do not any more."""
    one, two = both(
        lambda pipe: pipe.model.scale.requires_grad_(is_frozen), lambda: Direct(is_frozen)
    )
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_replicas_have_tensors_in_lists_and_dictionaries() -> None:
    with simulated(Machine(2, seed=1)), built(Direct, DEVICES, keep_closed=["last"]) as pipe:
        two = stepped(pipe)
        pipe.model.last.anchors[1] = pipe.model.last.anchors[1] * 2
        two += stepped(pipe)
    with simulated(Machine(2, seed=1)), built(Direct, DEVICES[:1], keep_closed=["last"]) as pipe:
        one = stepped(pipe)
        pipe.model.last.anchors[1] = pipe.model.last.anchors[1] * 2
        one += stepped(pipe)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_twins_follow_dtypes_shapes_and_strides() -> None:
    """And stay the same tensors, which stages may read by themselves."""
    original = nn.Parameter(torch.randn(3, 4))
    pair = _Twin(original, torch.device("cpu"))
    twin = pair.twin
    for change in (
        lambda t: t.t().contiguous().t(),
        torch.Tensor.bfloat16,
        lambda t: t[:2].contiguous(),
    ):
        original.data = change(original.detach())
        assert pair.follow()
        assert not pair.follow()
        assert pair.twin is twin
        assert twin.is_leaf
        assert (twin.shape, twin.dtype, twin.stride()) == (
            *(original.shape, original.dtype),
            original.stride(),
        )


def test_twins_of_parameters_that_have_no_gradients() -> None:
    """Such as quantized weights."""
    original = nn.Parameter(torch.arange(3), requires_grad=False)
    pair = _Twin(original, torch.device("cpu"))
    assert not pair.follow()
    assert isinstance(pair.twin, nn.Parameter)
    assert pair.twin.dtype == torch.int64
    assert not pair.twin.requires_grad


def test_a_step_that_failed_leaves_nothing() -> None:
    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise ValueError("no")
        return LOSS(output, target)

    def fail(pipe: ps.Pipeline) -> None:
        x, y = CASES["chain, 1f1b"].batch(0)
        with torch.enable_grad(), pytest.raises(ps.WorkerError, match="in the loss"):
            pipe.train_step(x, target=y, loss_fn=failing)

    one, two = both(fail)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_devices_of_several_kinds_are_refused() -> None:
    with simulated(Machine(2)), pytest.raises(ps.InputError, match="devices of one kind"):
        built(chain, ("sim:0", "cpu"))


def test_what_remembers_is_refused() -> None:
    with simulated(Machine(2)), pytest.raises(ps.InputError, match="remembers something"):
        built(lambda: nn.Sequential(Counting(), nn.Tanh()), DEVICES, keep_closed=["0"])


def test_statistics_of_whole_batches_are_refused() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    with simulated(Machine(2)), pytest.raises(ps.InputError, match="several devices"):
        built(normed, DEVICES, batchnorm="deferred")


def test_forwards_beside_what_adds_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a leaf is asked for its device in the midst of a forward, others have their turn."""
    usual = SimulatedTensor.device.fget

    def slow(tensor: SimulatedTensor) -> torch.device:
        if threading.current_thread().name == "penstock-0" and isinstance(tensor, nn.Parameter):
            time.sleep(0.002)
        return usual(tensor)

    monkeypatch.setattr(SimulatedTensor, "device", property(slow))
    one, two = both(lambda pipe: None)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
