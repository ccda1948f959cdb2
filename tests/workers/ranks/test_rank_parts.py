"""What a rank has of an optimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.backend import Role
from penstock.workers.ranks.workers import _RankPart


class _Alone:
    """The workers of one rank."""

    role = Role()

    def stepping(self, owned: Any) -> Any:
        return contextlib.nullcontext()

    def all_gather(self, what: str, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("again", ["edited", "added"])
def test_a_parameter_that_leaves_the_groups_and_comes_back(again: str) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2))
    workers: Any = _Alone()

    class Divide:
        number = 0

        def __call__(self, kind: Any, groups: Any, options: Any) -> Any:
            return _RankPart(kind, groups, options, ours, workers)

    mine = PipelineOptimizer(torch.optim.AdamW, ours, Divide(), lr=0.1)
    plain = torch.optim.AdamW(theirs, lr=0.1)
    for step in range(4):
        for optimizer, parameters in ((mine, ours), (plain, theirs)):
            if step == 1:
                optimizer.param_groups[0]["params"].pop(0)
            if step == 2 and again == "edited":
                optimizer.param_groups[0]["params"].append(parameters[0])
            if step == 2 and again == "added":
                optimizer.add_param_group({"params": [parameters[0]]})
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full((2,), number + step + 1.0)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
