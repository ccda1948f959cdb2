"""Weights that two processes map are named, and not copied."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import nn

from penstock.links.shared_memory import Receiver, Sender
from penstock.links.slots import Arrivals
from penstock.links.weights import Weights
from penstock.links.wire import Wire

CPU = torch.device("cpu")


class Ends:
    """A sender and a receiver with a weight in common."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.dispatch = 0
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.weights = Weights()
        self.weights.add(7, self.weight)
        self.sender = Sender(Wire(here), self, weights=self.weights)
        self.receiver = Receiver(Wire(there), self, Arrivals(CPU), weights=self.weights)

    def across(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.sender.put(values)
        return self.receiver.get()


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_a_weight_is_the_one_that_is_there(ends: Ends) -> None:
    for _ in range(2):
        x, found, cut_off = ends.across(torch.ones(2), ends.weight, ends.weight.detach())
        assert torch.equal(x, torch.ones(2))
        assert found.data_ptr() == cut_off.data_ptr() == ends.weight.data_ptr()
        assert [type(found), found.requires_grad, found.is_leaf] == [torch.Tensor, True, True]
        assert not cut_off.requires_grad
    (found * 2).sum().backward()
    assert torch.equal(found.grad, torch.full((3, 4), 2.0))
    assert ends.weight.grad is None


def test_parts_and_others_are_copied(ends: Ends) -> None:
    weight = ends.weight.detach()
    for value in (weight[:2], weight.t(), weight.view(4, 3), weight.clone(), weight.view(-1)):
        (found,) = ends.across(value)
        assert torch.equal(found, value)
        assert found.data_ptr() != weight.data_ptr()


def test_a_weight_that_has_moved_is_copied(ends: Ends) -> None:
    ends.weight.data = torch.zeros(3, 4)
    (found,) = ends.across(ends.weight)
    assert torch.equal(found, torch.zeros(3, 4))
    assert found.data_ptr() != ends.weight.data_ptr()


def test_autograd_hears_of_changes(ends: Ends) -> None:
    (found,) = ends.across(ends.weight)
    loss = (torch.ones(2, 4, requires_grad=True) @ found.t()).sum()
    torch.autograd.graph.increment_version([ends.weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_conjugate_of_a_weight_is_another_value() -> None:
    """It has the same address, shape, strides and dtype."""
    ends = Ends()
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
    ends.weights.add(8, weight)
    for value in (weight.conj(), weight.detach().conj()):
        (found,) = ends.across(value.detach())
        assert torch.equal(found, value)
        assert found.data_ptr() != weight.data_ptr()
    (found,) = ends.across(weight)
    assert found.data_ptr() == weight.data_ptr()
