"""One training script on any number of replicas: the bits of one device, whoever is late."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from tests.pipeline.subjects import Bits, Point, different, expected, run
from tests.pipeline.test_same_bits import threads_of
from tests.support.delays import held_up, slow_stages
from tests.workers.ranks.launching import Launcher

NAMES = ("resnet", "gpt2")  # BatchNorm; dropout and a tied weight
SHAPES = ("1x1", "1x2", "1x3", "1x4", "1x8", "2x2")
"""Stages x replicas."""
COUNT = 8  # micro-batches, of unequal sizes
QUICK = {("resnet", "threads", "1x3"), ("gpt2", "processes", "1x2"), ("resnet", "processes", "2x2")}

pytestmark = pytest.mark.usefixtures("pool")


def parsed(shape: str) -> tuple[Point, int]:
    """How a replica trains, and how many there are."""
    stages, replicas = map(int, shape.split("x"))
    return Point("1f1b", stages, COUNT, "none"), replicas


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in itertools.product(NAMES, ("threads", "processes"), SHAPES)
    ],
)
def test_the_bits_of_one_device(name: str, kind: Any, shape: str) -> None:
    point, replicas = parsed(shape)
    workers = point.workers * replicas
    late = workers // 2  # neither the first worker nor, of several, always the last

    def during(pipe: ps.Pipeline) -> Any:
        member = pipe._workers.members[late]
        return held_up(member.pid, seed=workers) if kind == "processes" else nullcontext()

    with slow_stages(seed=workers, worker=late):
        ours = run(name, point, replicas, during, workers=kind, devices=["cpu"] * workers)
    assert different(ours, expected(name, COUNT, threads_of(workers))) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_bits_of_one_device_under_torchrun(
    shape: str, launcher: Launcher, tmp_path: Path
) -> None:
    point, replicas = parsed(shape)
    workers = point.workers * replicas
    ranks = launcher.run(f"any_replicas:{shape}", tmp_path, workers, seconds=550)
    for name in NAMES:
        theirs = expected(name, COUNT, threads_of(workers))
        ours: Bits = {}
        for rank, found in enumerate(ranks):
            both = ours.keys() & found[name].keys()
            assert all(torch.equal(ours[key], found[name][key]) for key in both), rank
            ours |= found[name]
        assert different(ours, theirs) == []
