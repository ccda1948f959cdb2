"""Putting things back after a step that failed, so that the next one never sees half of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Backup:
    """The gradients of some parameters and the contents of some buffers, as they are now.

    Gradients are copied only where some exist, that is when the user accumulates over several
    steps; after `zero_grad()` they cost nothing. Buffers are those that a forward changes:
    BatchNorm's statistics, a few kilobytes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        self._gradients = [(p, p.grad, _copy(p.grad)) for p in parameters]
        self._buffers = [(b, b.detach().clone()) for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient
        for buffer, copy in self._buffers:
            buffer.copy_(copy)


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()
