"""Weights that processes map in common, so that one can be named to another instead of copied."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Named(NamedTuple):
    """A weight that a message speaks of.

    Attributes:
        number: of the weight.
        requires_grad: whether a gradient flows to it.
    """

    number: int
    requires_grad: bool


class Weights:
    """The weights that the processes at both ends of a link have, by numbers of the driver.

    Such as tied weights: the stage that reads one first sends it to a later stage with every
    micro-batch. A value is recognized as a weight by its address, shape, strides and dtype, so a
    view that a call has made of the whole weight is, too, but not its conjugate. So each link knows
    only the weights that cross it.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}  # by address

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Have one more, which stays where it is."""
        self._tensors[number] = tensor
        self._numbers[tensor.data_ptr()] = number

    def name(self, value: torch.Tensor) -> Named | None:
        """What a value is called, if it is one of them, and whole."""
        number = self._numbers.get(value.data_ptr())
        if number is None:
            return None
        known = self._tensors[number]
        is_it = value.shape == known.shape and value.stride() == known.stride()
        is_it = is_it and value.is_conj() == known.is_conj() and value.is_neg() == known.is_neg()
        is_there = known.data_ptr() == value.data_ptr() and known.dtype == value.dtype
        return Named(number, value.requires_grad) if is_it and is_there else None

    def named(self, name: Named) -> torch.Tensor:
        """The weight, as a value without a history."""
        value = self._tensors[name.number].detach()
        return value.requires_grad_() if name.requires_grad else value
