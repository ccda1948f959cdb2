"""Functions that are called after every step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


@pytest.fixture
def pipe() -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu"], audit=None) as pipe:
        yield pipe


def test_they_are_told_of_every_step(pipe: ps.Pipeline) -> None:
    x, told = torch.ones(4, 3), []
    handle = pipe.on_step(told.append)
    loss = pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    F.mse_loss(pipe(x[:3]), x[:3]).backward()
    pipe.eval_step(x, target=x, loss_fn=F.mse_loss)
    with torch.no_grad():
        pipe(x)
    first, second = told
    assert (first["step"], first["samples"], first["loss"]) == (1, 4, float(loss))
    assert (second["step"], second["samples"]) == (2, 3)
    assert "loss" not in second  # it is the script's own
    assert second["step_seconds"] > 0
    assert second["samples_per_second"] > 0
    assert all(type(value) in (int, float) for news in told for value in news.values())
    handle.remove()
    pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert len(told) == 2


def test_an_error_of_theirs_comes_after_the_step(pipe: ps.Pipeline) -> None:
    x = torch.ones(4, 3)

    def fails(news: dict[str, Any]) -> None:
        raise ConnectionError("the logger")

    handle = pipe.on_step(fails)
    with pytest.raises(ConnectionError, match="the logger"):
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert all(p.grad is not None for p in pipe.parameters())
    handle.remove()
    pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert pipe.status().steps == 2


def test_all_are_told_even_if_one_fails(pipe: ps.Pipeline) -> None:
    x, told = torch.ones(4, 3), []

    def fails(news: dict[str, Any]) -> None:
        raise ConnectionError("the logger")

    def fails_too(news: dict[str, Any]) -> None:
        raise OSError("the disk")

    pipe.on_step(fails)
    pipe.on_step(fails_too)
    pipe.on_step(lambda news: told.append(news["step"]))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the logger") as raised:
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        assert raised.value.__notes__ == ["Another on_step hook failed: OSError: the disk"]
    assert told == [1, 2]


def test_a_step_that_fails_is_not_told_of(pipe: ps.Pipeline) -> None:
    told: list[dict[str, Any]] = []
    pipe.on_step(told.append)
    x = torch.ones(4, 3)
    with pytest.raises(ps.WorkerError):
        pipe.train_step(x, target=x, loss_fn=lambda output, target: 1 / 0)
    assert not told
    pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert [news["step"] for news in told] == [1]
    assert pipe.status().pass_seconds is None


def test_gradients_are_there_and_enabled_when_they_are_called(pipe: ps.Pipeline) -> None:
    x, seen = torch.ones(4, 3), []
    weight = next(pipe.parameters())

    def look(news: dict[str, Any]) -> None:
        here = threading.current_thread() is threading.main_thread()
        seen.append((torch.is_grad_enabled(), weight.grad is not None, here))
        pipe.zero_grad()

    pipe.on_step(look)
    F.mse_loss(pipe(x), x).backward()
    pipe.train_step(x, target=x, loss_fn=F.mse_loss)
    assert seen == [(True, True, True)] * 2


def test_two_calls_before_one_backward() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3))
    a, b = torch.zeros(4, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    told: list[dict[str, Any]] = []
    with ps.Pipeline(model, (a,), devices=["cpu"], audit=None) as pipe:
        pipe.on_step(told.append)
        (pipe(a).sum() + pipe(b).sum()).backward()
        assert pipe.status().tokens == 30
        result = pipe(a)
        del result
        assert not pipe._runner.steps._forwards
    assert sum(news["tokens"] for news in told) == 30
