"""The contract: whoever runs a model, in how many stages, in which order, the bits are the same.

Kinds of workers, schedules, workers, micro-batches and recomputing, for six models. By default a
sample in which every pair of settings meets; the whole product is `slow`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.devices.choice import threads_per_worker
from penstock.schedule import SCHEDULES
from tests.pipeline.subjects import (
    Bits,
    Point,
    captured,
    different,
    expected,
    plan,
    run,
    sampled,
    subjects,
)
from tests.support.models import uniform_plan
from tests.workers.ranks.launching import Launcher

NAMES = ("resnet", "gpt2", "llama", "t5", "tied", "mixtral")
RECOMPUTE = ("none", "boundaries", "all")
PRODUCT = [
    Point(*settings)
    for settings in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 5), RECOMPUTE)
]
TWO = [point for point in PRODUCT if point.workers == 2 and point.microbatches > 1]
SAMPLED = {"threads": (PRODUCT, 6), "processes": (TWO, 3)}


pytestmark = pytest.mark.usefixtures("pool")


def selection() -> list[Any]:
    """Every model with every kind and every point, the sample unmarked."""
    found = []
    for number, (name, (kind, (points, count))) in enumerate(
        itertools.product(NAMES, SAMPLED.items())
    ):
        chosen = set(sampled(points, 37 * number, count))
        for point in PRODUCT:
            marks = [] if point in chosen else [pytest.mark.slow]
            found.append(pytest.param(name, kind, point, marks=marks, id=f"{name}-{kind}-{point}"))
    return found


@pytest.mark.parametrize(("name", "kind", "point"), selection())
def test_the_bits_of_one_device(name: str, kind: Any, point: Point) -> None:
    chosen = plan(name, point)
    assert any(stage.recompute for stage in chosen.stages) is (point.recompute != "none")
    ours = run(name, point, workers=kind, devices=["cpu"] * point.workers)
    assert len(ours) > 10
    # As many threads as a worker has, of this machine's cores.
    threads = threads_of(point.workers)
    assert different(ours, expected(name, point.microbatches, threads)) == []


def test_queries_of_a_fused_projection_cross() -> None:
    """They are views with gaps; packed on the way, attention gave other bits for them."""
    case, subject = subjects()["gpt2"], captured("gpt2")
    labels = subject.program.labels
    cut = 1 + next(k for k, label in enumerate(labels) if label.endswith("attn.transpose()"))
    (_, *crossing) = subject.program.cuts.boundary(cut)
    shapes = [str(subject.program.train.info(value)) for value in crossing]
    assert any("x2x6x16" in shape for shape in shapes), shapes
    point = Point("1f1b", 2, 2, "none")
    made = uniform_plan(subject.program, 2, 2, cuts=[cut])
    ours = run(case.name, point, plan=made, workers="processes", devices=["cpu"] * 2)
    assert different(ours, expected(case.name, 2, threads_of(2))) == []


def threads_of(workers: int) -> int:
    """The intra-op threads of each of so many workers."""
    return threads_per_worker(["cpu"] * workers)


@pytest.mark.parametrize(
    "scenario",
    [
        "contract_sample",
        *(pytest.param(f"contract_product:{name}", marks=pytest.mark.slow) for name in NAMES),
    ],
)
@pytest.mark.timeout(1200)
def test_the_bits_of_one_device_under_torchrun(
    scenario: str, launcher: Launcher, tmp_path: Path
) -> None:
    ranks = launcher.run(scenario, tmp_path, seconds=1100)
    assert all(ranks)
    for (name, point), first in ranks[0].items():
        ours: Bits = {}
        for found in (first, ranks[1][name, point]):
            gradients = {key for key in found if key.startswith("gradient")}
            assert not gradients & ours.keys()
            assert all(torch.equal(ours[key], found[key]) for key in ours.keys() & found.keys())
            ours |= found
        theirs = expected(name, point.microbatches, threads_of(2))
        assert different(ours, theirs) == [], f"{name}, {point}"


def test_every_model_is_cut_where_it_matters() -> None:
    """Else all of this would be easy."""
    for name in NAMES:
        subject = captured(name)
        assert any(call.random for call in subject.program.train.calls), name
        assert len(plan(name, Point("1f1b", 4, 3, "none")).stages) == 4
    tied = captured("tied")
    assert tied.model.head.weight is tied.model.table.weight
    buffers = dict(captured("resnet").model.named_buffers())
    assert any("running_mean" in name for name in buffers)
    assert set(subjects()) == set(NAMES)


class Masks(nn.Module):
    """Dropout of ones: what comes out is the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.first(x) * self.weight, self.second(x) + 0 * self.weight], 1)


def masks(point: Point, kind: Any, seed: int, draws: int = 0) -> list[torch.Tensor]:
    """Those of two batches, and what they are when they are multiplied with the gradient."""
    model, x = Masks(), torch.ones(7, 16)
    program = ps.capture(model, (x,))
    made = uniform_plan(
        program, point.workers, point.microbatches, point.schedule, recompute=point.recompute
    )
    devices = ["cpu"] * point.workers
    with ps.Pipeline(model, devices=devices, program=program, plan=made, workers=kind) as pipe:
        torch.manual_seed(seed)
        torch.rand(draws)
        found = [pipe(x).detach()]
        value = torch.arange(7 * 2 * 16.0).view(7, 2, 16)
        pipe.train_step(x, target=value, loss_fn=lambda o, t: (o * t).sum(), weight=None)
        assert model.weight.grad is not None
        return [*found, model.weight.grad.clone()]


def test_masks_depend_on_the_seed_and_nothing_else() -> None:
    base = masks(Point("1f1b", 2, 3, "none"), "threads", seed=7)
    kept = (base[0] != 0).float().mean()
    assert 0.3 < kept < 0.7
    same = [
        (Point("1f1b", 1, 3, "none"), "threads", 0),
        (Point("zero-bubble", 2, 3, "all"), "threads", 0),
        (Point("gpipe", 3, 3, "boundaries"), "threads", 0),
        (Point("1f1b", 2, 3, "all"), "processes", 0),
        (Point("1f1b", 2, 3, "none"), "threads", 99),  # drawing does not matter, seeding does
    ]
    for point, kind, draws in same:
        again = masks(point, kind, seed=7, draws=draws)
        assert all(torch.equal(a, b) for a, b in zip(again, base, strict=True)), (point, kind)
    other = masks(Point("1f1b", 2, 3, "none"), "threads", seed=8)
    assert not torch.equal(other[0], base[0])
    assert not torch.equal(other[1], base[1])
