"""Losses, metrics, hooks and clipping: a pipeline gives the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool import pooled
from tests.training import USES, assert_same, used, used_plainly

KINDS: Any = ["threads", "processes"]


@pytest.fixture(autouse=True)
def _pool() -> Iterator[None]:
    with pooled():
        yield


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", USES)
def test_the_bits_of_plain_pytorch(name: str, kind: Any, schedule: str) -> None:
    found = used(name, schedule=schedule, workers=kind, devices=["cpu"] * 2)
    assert_same(found, used_plainly(name))
