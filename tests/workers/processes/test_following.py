"""Attributes of modules that change between passes: worker processes always know of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture.places import MISSING
from penstock.comparison.reference import run_with_threads
from penstock.workers.following import Following
from tests.support.models import uniform_plan
from tests.support.training import assert_same

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Switched(nn.Module):
    """Takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if self.on else self.other(x)


def test_an_attribute_changes_in_the_pass_that_takes_another_way() -> None:
    torch.manual_seed(1)
    ours = nn.Sequential(Switched(), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 6))
    theirs = copy.deepcopy(ours)
    program = ps.capture(ours, (X,))
    plan = uniform_plan(program, 2, 2)
    with ps.Pipeline(ours, plan=plan, program=program, workers="processes", audit=None) as pipe:
        for step in range(3):
            for model in (ours, theirs):
                if step == 1:
                    model[0].on, model[1].momentum = False, 0.5
            pipe.train_step(X, loss_fn=loss_of)
            run_with_threads(lambda: [(loss_of(theirs(x)) / 2).backward() for x in X.chunk(2)], 1)
            assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))


class SlowlyRefusing(nn.Module):
    """Takes its time, and does not take large numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        if x.max() > 900:
            raise ValueError("too large")
        return x.clone()


def test_an_attribute_that_was_sent_with_a_pass_that_was_given_up_is_sent_again() -> None:
    model = nn.Sequential(SlowlyRefusing(), nn.BatchNorm1d(6)).eval()
    program = ps.capture(model, (X,), keep_closed=["0"])
    plan = uniform_plan(program, 2, 1, cuts=["1"])

    def batches() -> Iterator[torch.Tensor]:
        yield X
        yield X + 1000
        model[1].eps = 1.0
        yield X

    with (
        ps.Pipeline(model, plan=plan, program=program, workers="processes", audit=None) as pipe,
        torch.no_grad(),
    ):
        with pytest.raises(ps.WorkerError, match="too large"):
            list(pipe.map(batches(), ahead=3))
        assert model[1].eps == 1.0
        assert torch.equal(pipe(X), run_with_threads(lambda: model(X), 1))


@pytest.fixture
def modules() -> list[nn.Module]:
    """Two with an attribute each."""
    found = [nn.Module(), nn.Module()]
    for module in found:
        module.rate, module.held = 1.0, None
    return found


def test_modules_that_come_later_do_not_hide_what_has_changed(modules: list[nn.Module]) -> None:
    following = Following(lambda tensor: False)
    following.add(modules[:1])
    modules[0].rate = 2.0
    following.add(modules[1:])
    assert following.changes() == {0: {"rate": 2.0}}
    assert following.changes() == {}


def test_what_cannot_be_told_does_not_keep_other_news_back(modules: list[nn.Module]) -> None:
    shared = torch.zeros(2)
    following = Following(lambda tensor: tensor is shared)
    following.add(modules)
    modules[0].rate, modules[1].held = 2.0, shared
    for _ in range(2):
        with pytest.raises(ps.InputError, match="'held'"):
            following.changes()
        following.resend()
    modules[1].held = None
    assert following.changes() == {0: {"rate": 2.0}}


def test_doubts_add_up(modules: list[nn.Module]) -> None:
    following = Following(lambda tensor: False)
    following.add(modules)
    modules[0].rate = 2.0
    assert following.changes() == {0: {"rate": 2.0}}
    modules[0].held = "this"
    modules[1].rate = 3.0
    assert following.changes() == {0: {"held": "this"}, 1: {"rate": 3.0}}
    following.resend()
    following.resend()
    modules[0].rate = 4.0
    del modules[1].held
    assert following.changes() == {
        0: {"rate": 4.0, "held": "this"},
        1: {"rate": 3.0, "held": MISSING},
    }
    following.confirm()
    following.resend()
    assert following.changes() == {}
