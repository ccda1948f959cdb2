"""What is run in seeded interleavings: small models, cut in ways that stress boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.schedule import SCHEDULES
from penstock.schedule.recipes import StagesPerWorker

ROWS = 7  # of a batch: micro-batches are of unequal sizes
MICROBATCHES = 3


class Skips(nn.Module):
    """The input, and the first result, are used again at the end: they pass all stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.tanh(self.first(x))
        two = torch.tanh(self.second(one))
        three = torch.tanh(self.third(two)) + x
        return self.last(three * one)


class Tied(nn.Module):
    """The embedding is the last layer's weight as well: it crosses every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.middle, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        return self.head(torch.relu(self.norm(self.middle(hidden))))


class InPlace(nn.Module):
    """Stages begin with operations in place, on what has just arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).mul_(0.5).add_(1.0)
        return x


class Images(nn.Module):
    """Convolutions, statistics of batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.flatten(1)))


class Shared(nn.Module):
    """The gradient of what enters the second stage has the memory of a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.a * 2
        return self.last(torch.tanh(self.first(x)) * (scale + self.b.view(6)))


def _chain() -> nn.Module:
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())))


def _without_weights_first() -> nn.Module:
    return nn.Sequential(nn.Tanh(), *_chain())


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    Attributes:
        build: makes the model.
        shape: of one row of its input.
        cuts: the first calls of the stages but the first.
        devices: of the workers.
        recompute: for every stage whether all of it is recomputed.
        options: of the pipeline.
        integers: whether the input is integers below 11.
        own_streams: whether the user's thread works on streams of its own.
        given: where inputs and targets are: with the first and last stage, on the `"cpu"`, or
            `"pinned"` there, and written when a step is over.
        replicas: of the stages; they share the devices.
        shares: how many micro-batches each runs, if not equally many.
        more: whether it maps batches, evaluates a loss, records a timeline, saves and restores.
        adds_up: whether a step adds its gradients to half of those of the step before.
        apart: whether values travel between stages as they do between processes.
    """

    build: Callable[[], nn.Module]
    cuts: tuple[int, ...]
    shape: tuple[int, ...] = (6,)
    devices: tuple[str, ...] = ("sim:0", "sim:1")
    schedule: str = "1f1b"
    recompute: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    integers: bool = False
    own_streams: bool = False
    given: str = ""
    replicas: int = 1
    shares: tuple[int, ...] = ()
    more: bool = False
    adds_up: bool = False
    apart: bool = False

    def on(self, kind: str, count: int) -> Case:
        """The same on so many devices of a kind, which stand for all there are."""
        names = (f"{kind}:{int(name.partition(':')[2]) % count}" for name in self.devices)
        return replace(self, devices=tuple(names))

    def model(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(3)
        return self.build()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """An input and a target, other ones in every step."""
        generator = torch.Generator().manual_seed(step)
        if self.integers:
            x = torch.randint(11, (ROWS, 4), generator=generator)
            return x, torch.randn(ROWS, 4, 11, generator=generator)
        x = torch.randn(ROWS, *self.shape, generator=generator)
        with torch.no_grad():
            like = self.model().eval()(x)
        return x, torch.randn(like.shape, generator=generator)


# Stages on the CPU have no weights: PyTorch does not let a tensor become one of another class.
_FOUR, _TWO = (2, 4, 6), (4,)
_THREE_DEVICES = ("sim:0", "sim:1", "sim:2")
_FOUR_DEVICES = (*_THREE_DEVICES, "sim:3")


def _of_schedule(name: str) -> Case:
    return Case(
        _chain,
        _TWO if SCHEDULES[name].stages_per_worker is StagesPerWorker.ONE else _FOUR,
        schedule=name,
    )


CASES: dict[str, Case] = {
    **{f"chain, {name}": _of_schedule(name) for name in SCHEDULES if name != "fitted"},
    "skips": Case(Skips, (2, 4), devices=_THREE_DEVICES),
    "skips, recomputed": Case(Skips, (2, 4), devices=_THREE_DEVICES, recompute=True),
    "skips, two workers": Case(Skips, (2, 4, 6), schedule="interleaved"),
    "tied": Case(Tied, (2,), integers=True),
    "tied, gpipe, three devices": Case(
        Tied, (1, 3), integers=True, devices=_THREE_DEVICES, schedule="gpipe"
    ),
    "tied, recomputed": Case(Tied, (2,), integers=True, recompute=True),
    "in place": Case(InPlace, (4, 7), devices=_THREE_DEVICES),
    "images": Case(Images, (3,), shape=(2, 6, 6)),
    "images, recomputed": Case(Images, (3,), shape=(2, 6, 6), recompute=True),
    "images, deferred": Case(
        Images, (3,), shape=(2, 6, 6), options={"batchnorm": "deferred"}, schedule="gpipe"
    ),
    "from the CPU": Case(_without_weights_first, (1,), devices=("cpu", "sim:0")),
    "to the CPU": Case(_chain, (7,), devices=("sim:0", "cpu")),
    "by way of the CPU": Case(_chain, (3, 4), devices=("sim:0", "cpu", "sim:1")),
    "own streams": Case(_chain, _TWO, own_streams=True),
    "images, own streams": Case(Images, (3,), shape=(2, 6, 6), own_streams=True),
    "one device twice": Case(_chain, _TWO, devices=("sim:0", "sim:0")),
    "chain, and more": Case(_chain, (2, 5), devices=_THREE_DEVICES, more=True),
    "tied, and more": Case(Tied, (2,), integers=True, more=True),
    "images, and more": Case(Images, (3,), shape=(2, 6, 6), more=True),
    "own streams, and more": Case(_chain, _TWO, own_streams=True, more=True),
    "to the CPU, and more": Case(_chain, (7,), devices=("sim:0", "cpu"), more=True),
    "inputs of the CPU": Case(_chain, _TWO, given="cpu", more=True),
    "pinned inputs": Case(_chain, _TWO, given="pinned"),
    "pinned images": Case(Images, (3,), shape=(2, 6, 6), given="pinned", more=True),
    "pinned integers": Case(Tied, (1, 3), integers=True, devices=_THREE_DEVICES, given="pinned"),
    "replicas on one device": Case(
        Images, (), shape=(2, 6, 6), devices=("sim:0", "sim:0"), replicas=2, more=True
    ),
    "replicas": Case(_chain, (), replicas=2, more=True),
    "three replicas, own streams": Case(
        _chain, (), devices=_THREE_DEVICES, replicas=3, own_streams=True
    ),
    "replicas of images": Case(Images, (), shape=(2, 6, 6), replicas=2, more=True),
    "three replicas of images": Case(
        Images, (), shape=(2, 6, 6), devices=_THREE_DEVICES, replicas=3, own_streams=True
    ),
    "replicas of images, recomputed": Case(Images, (), shape=(2, 6, 6), replicas=2, recompute=True),
    "replicas, adding up": Case(_chain, (), replicas=2, adds_up=True, own_streams=True),
    "replicas, adding up, the second one first": Case(
        _chain, (), replicas=2, shares=(1, 2), adds_up=True, own_streams=True
    ),
    "replicas, tied": Case(Tied, (), integers=True, replicas=2, given="pinned"),
    "replicas of stages": Case(Skips, (4,), devices=_FOUR_DEVICES, replicas=2, more=True),
    "replicas of stages, tied": Case(
        Tied, (2,), integers=True, devices=_FOUR_DEVICES, replicas=2, schedule="gpipe"
    ),
    "replicas of stages across": Case(
        Images, (3,), shape=(2, 6, 6), devices=("sim:0", "sim:1", "sim:1", "sim:0"), replicas=2
    ),
    "replicas of stages on the same devices": Case(
        Skips, (4,), devices=("sim:0", "sim:1", "sim:0", "sim:1"), replicas=2, more=True
    ),
    "gradients in the same memory": Case(Shared, (3,)),
    "gradients in the same memory, apart": Case(Shared, (3,), apart=True),
    "apart": Case(_chain, (2, 5), devices=_THREE_DEVICES, more=True, apart=True),
    "apart, gpipe": Case(_chain, _TWO, schedule="gpipe", apart=True),
    "apart, zero-bubble": Case(_chain, _TWO, schedule="zero-bubble", apart=True),
    "skips, apart": Case(Skips, (2, 4), devices=_THREE_DEVICES, apart=True),
    "tied, apart": Case(Tied, (2,), integers=True, more=True, apart=True),
    "images, apart": Case(Images, (3,), shape=(2, 6, 6), recompute=True, apart=True),
    "in place, apart": Case(InPlace, (4, 7), devices=_THREE_DEVICES, apart=True),
    "own streams, apart": Case(_chain, _TWO, own_streams=True, apart=True),
    "one device twice, apart": Case(_chain, _TWO, devices=("sim:0", "sim:0"), apart=True),
    "by way of the CPU, apart": Case(_chain, (3, 4), devices=("sim:0", "cpu", "sim:1"), apart=True),
}
