"""In mixed precision too, processes and the ranks of torchrun have the bits of threads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.precision import SCALE, STEPS, Found, everything
from tests.workers.ranks.test_torchrun import assert_equal

pytestmark = pytest.mark.usefixtures("pool")


@functools.cache
def by_threads() -> dict[str, Found]:
    return everything({"workers": "threads", "devices": ["cpu"] * 2})


def test_what_is_compared() -> None:
    """Some steps are left out, also the one in which only the last stage overflows."""
    scales = by_threads()["scaled"]["scales"]
    assert scales[1] > scales[0] == SCALE["init_scale"]
    assert scales[2] < scales[1]
    assert scales[6] < scales[5]


def test_processes() -> None:
    found = everything({"workers": "processes", "devices": ["cpu"] * 2})
    assert list(found) == [steps.__name__ for steps in STEPS]
    assert_equal("processes", found, by_threads())


@pytest.mark.parametrize("scenario", ["mixed_precision", "narrow_by_process_group"])
def test_ranks(launcher: Any, tmp_path: Path, scenario: str) -> None:
    """All have the same losses, scales and states, and between them they have all gradients."""
    ranks = launcher.run(scenario, tmp_path)
    for name in ranks[0]:
        gradients, expected = {}, by_threads()[name]
        for found in ranks:
            own = dict(found[name])
            gradients.update(own.pop("gradients"))
            assert_equal(name, own, {k: v for k, v in expected.items() if k != "gradients"})
        assert_equal(name, gradients, expected["gradients"])
    assert list(ranks[0])[-1] == STEPS[-1].__name__
