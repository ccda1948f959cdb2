"""Plain objects that modules share and change stay within one stage, in the order of one device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.training import assert_same_gradients

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(8, 6)


class Writing(nn.Module):
    """Leaves in a cache how often it was called."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.lin, self.cache = nn.Linear(6, 6), cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.cache if isinstance(self.cache, dict) else vars(self.cache)
        held["n"] = held.get("n", 0) + 1
        return self.lin(x) * float(bool(x.sum() > -1e9))  # closes it


class Reading(Writing):
    """Reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.cache if isinstance(self.cache, dict) else vars(self.cache)
        return self.lin(x) / (1 + held["n"]) + 0 * float(bool(x.sum() > -1e9))


def model(cache: Any) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [Writing(cache), nn.Linear(6, 6), nn.Tanh(), Reading(cache), nn.Linear(6, 6)]
    return nn.Sequential(nn.Linear(6, 6), *layers)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_modules_that_share_what_they_change_stay_together(kind: Any) -> None:
    split, plain = model(kind()), model(kind())
    program = ps.capture(split, (X,))
    assert {"1", "4"} <= set(program.closed)
    first, last = (program.labels.index(name) for name in ("1", "4"))
    assert all("1.cache" in program.cuts.reasons[k] for k in range(first + 1, last + 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ps.Pipeline(
            *(split, (X,)),
            program=program,
            devices=["cpu"] * 2,
            num_microbatches=4,
            audit=None,
            replicas=1,
        ) as pipe:
            assert_same_gradients(pipe, plain, X, Y)
    finally:
        torch.set_num_threads(threads)


def test_cuts_between_them_are_refused_by_name() -> None:
    with pytest.raises(ps.PlanError, match=r"1\.cache \(SimpleNamespace\).*changes"):
        ps.Pipeline(model(SimpleNamespace()), (X,), devices=["cpu"] * 2, cuts=["2"], replicas=1)


def test_what_nobody_changes_may_be_shared() -> None:
    config = SimpleNamespace(n=2)
    program = ps.capture(nn.Sequential(*(Reading(config) for _ in range(3))), (X,))
    assert not program.cuts.reasons


class Located(nn.Module):
    """Knows a path, which keeps what it computes of itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lin, self.path = nn.Linear(6, 6), path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hash(self.path)
        return self.lin(x) * float(bool(x.sum() > -1e9))  # closes it


def test_a_path_that_modules_share_is_nothing_that_they_change() -> None:
    path = Path("somewhere") / "else"
    program = ps.capture(nn.Sequential(Located(path), nn.Linear(6, 6), Located(path)), (X,))
    assert {"0", "2"} <= set(program.closed)
    assert not program.cuts.reasons
