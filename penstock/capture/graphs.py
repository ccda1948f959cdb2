"""Forwards whose graphs are built, so that it shows what needs a gradient, and hold nothing."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks


class Hollow(saved_tensors_hooks):
    """While open, autograd builds graphs as ever, but saves no tensors for their backward.

    A forward that computes gradients itself cannot do so then.

    Attributes:
        asked: whether a backward has wanted what was not saved.
    """

    def __init__(self) -> None:
        super().__init__(_forget, self._refuse)
        self.asked = False

    def _refuse(self, _: None) -> torch.Tensor:
        self.asked = True
        raise RuntimeError("this graph was built without what its backward needs")


def _forget(_: torch.Tensor) -> None:
    """A hook for tensors that autograd saves, which keeps none of them."""
