"""Optimizers of torch over the model's own parameters, whose gradients passes have left there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

X, Y = torch.randn(8, 6), torch.randn(8, 4)


def build() -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return ps.Pipeline(model, (X,), devices=["cpu", "cpu"], num_microbatches=2, replicas=1)


@pytest.fixture
def pipe() -> Iterator[ps.Pipeline]:
    with build() as found:
        yield found


def trained(pipe: ps.Pipeline, way: str) -> None:
    if way == "train_step":
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    else:
        F.mse_loss(pipe(X), Y).backward()


@pytest.mark.parametrize("way", ["train_step", "backward"])
def test_gradients_that_are_cleared_before_the_step(pipe: ps.Pipeline, way: str) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = [p.clone() for p in pipe.parameters()]
    trained(pipe, way)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="finds no gradient and changes nothing"):
        optimizer.step()
    assert all(map(torch.equal, before, pipe.parameters()))


def test_it_is_said_once_with_an_optimizer_of_the_pipeline(pipe: ps.Pipeline) -> None:
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    trained(pipe, "train_step")
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["finds no gradient" in str(each.message) for each in caught] == [True]


def test_a_step_of_another_model_between_does_not_hide_it(pipe: ps.Pipeline) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    trained(pipe, "train_step")
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="finds no gradient and changes nothing"):
        optimizer.step()


def of_a_part(pipe: ps.Pipeline) -> None:
    """Only this part has no gradients; another optimizer may have the rest."""
    part = pipe.model[2]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    trained(pipe, "train_step")
    part.zero_grad()
    optimizer.step()


def with_a_closure(pipe: ps.Pipeline) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    trained(pipe, "train_step")

    def closure() -> Any:
        optimizer.zero_grad()
        return pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

    optimizer.zero_grad()
    optimizer.step(closure)
    optimizer.zero_grad()
    trained(pipe, "train_step")
    optimizer.step()


def of_another_model(pipe: ps.Pipeline) -> None:
    other = nn.Linear(2, 2)
    trained(pipe, "train_step")
    pipe.zero_grad()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def twice(pipe: ps.Pipeline) -> None:
    """The second has nothing to do, as it would on one device, and no pass came before it."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    trained(pipe, "train_step")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def in_turns(pipe: ps.Pipeline) -> None:
    """Two pipelines, as in a GAN."""
    with build() as other:
        of_pipe, of_other = (torch.optim.SGD(p.parameters(), lr=0.1) for p in (pipe, other))
        for _ in range(2):
            of_pipe.zero_grad()
            trained(pipe, "train_step")
            of_pipe.step()
            of_other.zero_grad()
            trained(other, "backward")
            of_other.step()


@pytest.mark.parametrize("work", [of_a_part, with_a_closure, of_another_model, twice, in_turns])
def test_what_is_right_is_not_warned_of(pipe: ps.Pipeline, work: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work(pipe)
