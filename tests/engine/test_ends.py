"""The two ends: the batch, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.capture import Key
from penstock.engine.ends import Endings, Feed, Loss, LossFailed, Outlet
from penstock.errors import InputError

CPU = torch.device("cpu")


class Dicts(Endings):
    """A model that returns its only value in a dict, with the micro-batch's number."""

    def result(self, microbatch: int, values: Any) -> Any:
        return {"output": values[0], "number": microbatch}


def outlet(function: Callable[..., Any], target: tuple[Any, ...] = ()) -> Outlet:
    found = Outlet(Dicts())
    found.begin(Loss(function, [target], [0.25]), {}, [Key(0, 0, 0)])
    return found


def test_a_loss_starts_the_backward_with_its_weight() -> None:
    value, target = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    end = outlet(lambda out, t: (out["output"] * t).sum() * (3 + out["number"]), (target,))
    roots = end.send(0, (value,))
    assert torch.equal(end.losses[0], (value * target).sum().detach() * 3)
    assert not end.losses[0].requires_grad
    gradients = end.receive_gradients(0)
    torch.autograd.backward([r for r in roots if r], [g for g in gradients if g is not None])
    assert torch.equal(value.grad, target * (3 * torch.tensor(0.25)))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda out: 3.0, "returned a float"),
        (lambda out: None, "returned a NoneType"),
        (lambda out: out["output"], r"shape \(3, 2\)"),
        (lambda out: out["output"].detach().sum(), "was it detached"),
        (lambda out: torch.zeros(()), "was it detached"),
    ],
)
def test_a_loss_must_be_a_scalar_with_a_gradient(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(LossFailed) as caught:
        outlet(function).send(0, (torch.randn(3, 2, requires_grad=True),))
    assert isinstance(caught.value.__cause__, InputError)
    with pytest.raises(InputError, match=words):
        raise caught.value.__cause__


def test_a_loss_of_one_element_is_a_scalar() -> None:
    end = outlet(lambda out: out["output"].sum().view(1, 1))
    end.send(0, (torch.randn(3, 2, requires_grad=True),))
    assert end.losses[0].shape == (1, 1)


def test_results_are_kept_without_their_history() -> None:
    end = Outlet(Endings())
    value = torch.randn(3, requires_grad=True) * 2
    (root,) = end.send(1, (value,))
    assert root is not None
    assert torch.equal(end.results[1][0], value.detach())
    assert not end.results[1][0].requires_grad
    end.clear()
    assert end.results == {}


def test_the_feed_keeps_gradients_that_exist() -> None:
    feed, gradient = Feed(CPU), torch.ones(2)
    feed.values = [(torch.zeros(2), 5), (torch.ones(2), 5)]
    assert feed.receive(1)[0] is feed.values[1][0]
    assert feed.receive(1)[1] == 5
    feed.send_gradients(0, [None, None])
    feed.send_gradients(1, [gradient, None])
    assert feed.gradients == {1: [gradient, None]}
