"""Whatever runs in a Ray cluster has the bits of one device, as the oracle has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock as ps
from tests.pipeline.subjects import Point, different, expected, run, sampled
from tests.pipeline.test_same_bits import NAMES, TWO
from tests.support.actors import lent_actors

HERE = ps.Ray(cpus=1)
OFTEN = ("resnet",)


@pytest.fixture(autouse=True)
def _actors() -> Iterator[None]:
    with lent_actors():
        yield


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_stages(name: str) -> None:
    (point,) = sampled(TWO, 37 * NAMES.index(name), 1)
    ours = run(name, point, workers=HERE, devices=["cpu"] * 2)
    assert len(ours) > 10
    assert different(ours, expected(name, point.microbatches, threads=1)) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [("resnet", 1, 2), pytest.param("gpt2", 2, 2, marks=pytest.mark.slow)],
)
def test_replicas(name: str, stages: int, replicas: int) -> None:
    """BatchNorm's statistics go around, and optimizers' new weights; with stages as well."""
    point = Point("1f1b", stages, 3, "none")
    count = stages * replicas
    ours = run(name, point, replicas, workers=HERE, devices=["cpu"] * count)
    assert different(ours, expected(name, 3, threads=1)) == []
