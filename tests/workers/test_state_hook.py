"""The hook that sees the state of a model read; pickled and deep copies of the model lack it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.workers.ranks.stale import StaleCopy
from penstock.workers.state_hook import StateHook


def pickled(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_copies_have_a_state_that_nobody_checks(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Linear(2, 2)
    reads: list[bool] = []
    model.register_state_dict_pre_hook(StateHook(model, lambda module, part: reads.append(part)))
    other = copied(model)
    reads.clear()
    assert torch.equal(other.state_dict()["weight"], model.weight)
    assert not reads


def test_a_part_is_said_to_be_one_and_live_tensors_are_no_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    reads: list[tuple[nn.Module, bool]] = []
    hook = StateHook(model, lambda module, part: reads.append((module, part)))
    for module in model.modules():
        module.register_state_dict_pre_hook(hook)
    model.state_dict(keep_vars=True)
    assert not reads
    model.state_dict()
    assert reads == [(model, False), (model[0], True)]


def test_a_copy_of_a_rank_is_pickled_unless_it_is_old() -> None:
    model = nn.Linear(2, 2)
    copy_of_rank = StaleCopy(model, list)
    copy_of_rank.refreshed()
    assert torch.equal(pickled(model).state_dict()["weight"], model.weight)
    copy_of_rank.trained()
    with pytest.raises(InputError, match="mixture"):
        pickle.dumps(model)
