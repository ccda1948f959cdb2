"""A1: two linear layers on two devices, trained in the plain style."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.bench.contestants import RATE
from penstock.bench.turns import UNAUDITED, Contestant, measure, timed, warm_up
from penstock.pipeline import Pipeline
from penstock.workers.thread_pool import ThreadPool

_STEPS = 20  # that are timed together: one takes well below a millisecond


@dataclass(frozen=True)
class ToyResult:
    """The times of the toy, and whether both ways give the same weights.

    Attributes:
        one_device: the toy on the first device alone; a repeat is `steps` steps.
        split: a layer on each of two devices.
        steps: training steps of each contestant in a repeat.
        exact: whether both have the same weights after all of them, bit for bit.
    """

    one_device: Contestant
    split: Contestant
    steps: int
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        rows = [self.one_device.to_dict(), self.split.to_dict()]
        return {"contestants": rows, "steps_per_repeat": self.steps, "exact": self.exact}

    def __str__(self) -> str:
        times = [
            f"{1e3 * c.mean / self.steps:.2f} ± {1e3 * c.deviation / self.steps:.2f} ms a step"
            for c in (self.split, self.one_device)
        ]
        devices = ", ".join(self.split.facts["devices"])
        same = "the same bits" if self.exact else "NOT the same bits"
        return (
            f"A1  toy of two layers on {devices}: {times[0]}; one device {times[1]}; "
            f"{same} after training"
        )


def run_toy(devices: Sequence[str], repeats: int = 5) -> ToyResult:
    """Train the tutorial's toy, split and unsplit: batch 20, mean squared error, SGD.

    The training loop is that of one device, except that labels are moved to the output's device.

    Args:
        devices: two devices; the unsplit toy runs on the first.
        repeats: the number of repeats, of 20 steps each.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    twin = copy.deepcopy(model).to(devices[0])
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5)

    def train(forward: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            output = forward(x)
            F.mse_loss(output, labels.to(output.device)).backward()
            optimizer.step()

    with ExitStack() as stack:
        pipe = Pipeline(
            model, (inputs,), devices=devices, num_microbatches=1, replicas=1, audit=UNAUDITED
        )
        stack.callback(pipe.close)
        threads, first = pipe.threads_per_worker, torch.device(devices[0])
        alone = ThreadPool([first], threads, abort=lambda: None, reset=lambda: None)
        stack.callback(alone.close)
        on_one = partial(alone.run, [partial(train, twin, twin, inputs.to(first))])
        one_device = Contestant("one device", timed(on_one), _where(devices[:1]))
        split = Contestant("split", timed(partial(train, pipe, model, inputs)), _where(devices))
        warm_up([one_device, split], _quietly)
        measure([one_device, split], repeats, 1, _quietly)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    exact = all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    return ToyResult(one_device, split, _STEPS, exact)


def _where(devices: Sequence[str]) -> dict[str, Any]:
    return {"devices": list(devices)}


def _quietly(_: str) -> None:
    """Report no progress: this takes only a moment."""
