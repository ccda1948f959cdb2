"""Gradient clipping, and the norm of gradients that are on several ranks.

The results have the bits of one device that has all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.torch_internals import foreach_norms, group_by_device_and_dtype

Clipped = torch.Tensor | Iterable[torch.Tensor] | None
"""The parameters whose gradients are clipped: one, or some, or all of the model's."""

Norm = tuple[torch.Tensor, torch.dtype]
"""The norm of one gradient, and the gradient's dtype."""


class Clipping(NamedTuple):
    """How gradients are scaled down; the arguments of `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: the norm that they have at most afterwards.
        norm_type: the order of the norm, `float("inf")` for the largest entry.
        error_if_nonfinite: whether a norm that is no finite number is an error.
        foreach: whether torch's kernels for many tensors at once are used; `None` if it may choose.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    foreach: bool | None = None

    def clip(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Scale the gradients of all these parameters; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(parameters, *self)


@torch.no_grad()
def norms_of(parameters: Mapping[int, torch.Tensor], clipping: Clipping) -> dict[int, Norm]:
    """The norms of gradients, as `torch.nn.utils.clip_grad_norm_` computes each of them.

    Args:
        parameters: on one device, each with a gradient.
        clipping: says which norm.
    """
    order, together = float(clipping.norm_type), clipping.foreach is not False
    found: dict[int, Norm] = {}
    for dtype in {p.grad.dtype for p in parameters.values() if p.grad is not None}:
        gradients = {
            k: p.grad for k, p in parameters.items() if p.grad is not None and p.grad.dtype == dtype
        }
        tensors = list(gradients.values())
        norms = (
            foreach_norms(tensors, order)
            if together
            else [torch.linalg.vector_norm(gradient, order) for gradient in tensors]
        )
        found |= {k: (norm, dtype) for k, norm in zip(gradients, norms, strict=True)}
    return found


@torch.no_grad()
def total_norm(norms: Sequence[Norm], clipping: Clipping, device: torch.device) -> torch.Tensor:
    """The norm of all gradients.

    Args:
        norms: the norms of the gradients, in the order of the parameters.
        clipping: says which norm.
        device: where it is computed.

    Raises:
        RuntimeError: from torch, if the norm is not finite and `error_if_nonfinite` is set.
    """
    if not norms:
        return torch.tensor(0.0)
    stand_ins = [torch.empty(0, dtype=dtype) for _, dtype in norms]
    grouped = group_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
    order = [k for _, numbers in grouped.values() for k in numbers]
    stacked = torch.stack([norms[k][0].to(device) for k in order])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, float(clipping.norm_type))
    if clipping.error_if_nonfinite:
        nn.utils.get_total_norm(total, clipping.norm_type, error_if_nonfinite=True)
    return total


def clip_values(
    parameters: Sequence[torch.Tensor], clip_value: float, foreach: bool | None
) -> None:
    """Call `torch.nn.utils.clip_grad_value_`, unless no parameter has a gradient: it fails then."""
    own = [parameter for parameter in parameters if parameter.grad is not None]
    if own:
        nn.utils.clip_grad_value_(own, clip_value, foreach)
