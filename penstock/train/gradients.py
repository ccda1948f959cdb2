"""Putting gradients back after a step that failed, so that the next one never sees half of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class GradientBackup:
    """The gradients of some parameters as they are now.

    A copy is made only of gradients that exist, that is when the user accumulates over several
    steps; after `zero_grad()` this costs nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._saved = [
            (p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for parameter, gradient, copy in self._saved:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient
