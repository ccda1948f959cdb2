"""What a link carries between two stages, and what it looks like from each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Values = tuple[Any, ...]
"""What crosses from a stage to the next for a micro-batch: tensors, and plain data."""

Gradients = Sequence[torch.Tensor | None]
"""The gradients of values, one each; `None` where there is none."""

Roots = Sequence[GradientEdge | None]
"""Where the backward of values starts in autograd's graph."""


class Source(Protocol):
    """Where a stage's values come from, and where their gradients go."""

    def receive(self, microbatch: int) -> Values:
        """The values of a micro-batch; waits for them."""

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Hand back the gradient of each value, `None` where there is none."""


class Sink(Protocol):
    """Where a stage's results go, and where their gradients come from."""

    def send(self, microbatch: int, results: Values) -> Roots:
        """Hand over a micro-batch's results; returns where its backward will start."""

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The gradient of each root; waits for them."""


class InDispatch(Protocol):
    """Whoever sends or receives, in the jobs of this number; messages of earlier ones are stale."""

    dispatch: int


def edges(results: Values) -> Roots:
    """For every result where its backward starts; the result itself need not be kept for that.

    Without gradients there is none, though a view of a parameter still asks for one.
    """
    if not torch.is_grad_enabled():
        return [None] * len(results)
    return [
        edge_of(r) if isinstance(r, torch.Tensor) and r.requires_grad else None for r in results
    ]


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Where the backward of a tensor that requires gradients starts.

    `None` for a view made under `no_grad`, which says that it requires them, and passes none on.
    """
    if tensor.grad_fn is None and tensor._is_view():
        try:
            return get_gradient_edge(tensor)
        except (AssertionError, RuntimeError):  # by the version of torch
            return None
    return get_gradient_edge(tensor)
