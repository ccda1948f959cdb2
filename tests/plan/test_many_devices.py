"""Planning many unequal devices: what it takes, counted."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from penstock.plan.problem import Problem
from penstock.plan.request import Request
from penstock.plan.search import plans
from penstock.plan.solver import least_limit
from penstock.profile import DeviceProfile
from penstock.profile.data import Profile

_DEVICES = 64
_CALLS = 80
_ROWS = (1, 4, 16)


def unequal() -> Profile:
    """64 devices of four speeds, and calls of all sizes."""
    rng = np.random.default_rng(0)
    each = rng.lognormal(-7.0, 0.7, _CALLS)
    kinds = {}
    for k, speed in enumerate((1.0, 1.7, 3.1, 5.3)):
        lines = tuple(tuple((each * rows / speed).tolist()) for rows in _ROWS)
        double = tuple(tuple(2 * seconds for seconds in line) for line in lines)
        kinds[f"kind{k}"] = DeviceProfile(
            kind=f"kind{k}", rows=_ROWS, forward=lines, backward=double, spread=0.0
        )
    return Profile(
        fingerprint="0123456789abcdef",
        batch_size=256,
        devices=tuple(f"kind{k * 4 // _DEVICES}" for k in range(_DEVICES)),
        kinds=kinds,
        labels=tuple(f"layer{k}" for k in range(_CALLS)),
        weights=(1 << 20,) * _CALLS,
        boundary=(1.0,) * (_CALLS + 1),
        forbidden={},
        saved=(1.0,) * _CALLS,
    )


def test_sixty_four_devices_are_planned_with_few_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be the fastest is not cut, and an optimum is found in a few steps."""
    solver = sys.modules[least_limit.__module__]
    sweep = vars(solver)["_sweep"]
    steps = []

    def counted(problem: Problem, *args: Any) -> Any:
        steps.append(len(problem.steps))
        return sweep(problem, *args)

    monkeypatch.setattr(solver, "_sweep", counted)
    assert plans(unequal(), Request())[0].devices
    assert sum(steps) < 22_000
