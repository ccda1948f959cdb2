"""Groups of parameters by name and by filter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.training.parameter_groups import parameter_groups


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def named(model: nn.Module, groups: Any) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_weight_decay_on_matrices_only(model: nn.Module) -> None:
    groups = parameter_groups(
        model,
        [
            {"params": lambda name, parameter: parameter.ndim >= 2, "weight_decay": 0.1},
            {"params": "*", "weight_decay": 0.0},
        ],
    )
    assert named(model, groups) == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    torch.optim.AdamW(groups)


def test_patterns(model: nn.Module) -> None:
    groups = parameter_groups(model, [{"params": ["*.bias", "1.*"]}, {"params": "?.weight"}])
    assert named(model, groups) == [
        ["0.bias", "1.weight", "1.bias", "2.bias"],
        ["0.weight", "2.weight"],
    ]


def test_lists_and_filters_together(model: nn.Module) -> None:
    groups = parameter_groups(model, [{"params": [model[0].weight], "lr": 1.0}, {"params": "*"}])
    assert named(model, groups)[0] == ["0.weight"]
    assert len(named(model, groups)[1]) == 5


def test_what_torch_takes_goes_through(model: nn.Module) -> None:
    assert [p is q for p, q in zip(parameter_groups(model, None), model.parameters(), strict=True)]
    some = [model[0].weight, model[2].bias]
    assert all(a is b for a, b in zip(parameter_groups(model, iter(some)), some, strict=True))
    assert parameter_groups(model, [{"params": some}]) == [{"params": some}]
    with_names = list(model.named_parameters())
    assert len(parameter_groups(model, with_names)) == 6


def test_nothing_fits(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"'\*.gamma' matches no parameter.*0.weight, 0.bias, "):
        parameter_groups(model, [{"params": "*.gamma"}, {"params": "*"}])


def test_nothing_is_left_out_by_mistake(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"3 parameters are in no group, 0.bias, 1.bias, 2.bias"):
        parameter_groups(model, [{"params": "*.weight"}])
    for layer in model:
        layer.bias.requires_grad_(False)
    assert named(model, parameter_groups(model, [{"params": "*.weight"}])) == [
        ["0.weight", "1.weight", "2.weight"]
    ]
