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
        """Put gradients and buffers back as they were when the backup was made."""
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient
        for buffer, copy in self._buffers:
            buffer.copy_(copy)


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class Backups:
    """What the passes that are under way may change, as it was before each of them."""

    def __init__(self) -> None:
        self._of: dict[int, list[Backup]] = {}  # by the number of the pass

    def __bool__(self) -> bool:
        """Whether any pass is under way."""
        return bool(self._of)

    def begin(self, number: int, backups: Iterable[Backup] = ()) -> None:
        """A pass begins that may change what is in these backups, and in those added later."""
        self._of[number] = list(backups)

    def add(self, number: int, backup: Backup) -> None:
        """A worker begins with its part of a pass; may be called from any thread."""
        self._of[number].append(backup)

    def drop(self, number: int) -> None:
        """A pass has ended well, or has never begun."""
        self._of.pop(number, None)

    def restore(self) -> None:
        """Put back what passes have changed that did not come to their end, the oldest last."""
        for number in sorted(self._of, reverse=True):
            for backup in self._of[number]:
                backup.restore()
        self._of.clear()
