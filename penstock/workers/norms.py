"""The norm of gradients that are on several ranks, in the bits of one device that has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

Norm = tuple[torch.Tensor, torch.dtype]
"""The norm of one gradient, and the gradient's dtype."""


@torch.no_grad()
def norms_of(parameters: Mapping[int, nn.Parameter], norm_type: float) -> dict[int, Norm]:
    """The norms of gradients, as `torch.nn.utils.clip_grad_norm_` computes each of them.

    Args:
        parameters: on one device, each with a gradient.
        norm_type: the order of the norm.
    """
    found: dict[int, Norm] = {}
    for dtype in {p.grad.dtype for p in parameters.values() if p.grad is not None}:
        gradients = {
            k: p.grad for k, p in parameters.items() if p.grad is not None and p.grad.dtype == dtype
        }
        norms = torch._foreach_norm(list(gradients.values()), float(norm_type))
        found |= {k: (norm, dtype) for k, norm in zip(gradients, norms, strict=True)}
    return found


@torch.no_grad()
def total_norm(norms: Sequence[Norm], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of all gradients.

    Args:
        norms: in the order of the model's parameters.
        norm_type: the order of the norm.
        device: where it is computed.
    """
    if not norms:
        return torch.tensor(0.0)
    stand_ins = [torch.empty(0, dtype=dtype) for _, dtype in norms]
    grouped = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
    order = [k for _, numbers in grouped.values() for k in numbers]
    stacked = torch.stack([norms[k][0].to(device) for k in order])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, float(norm_type))
    return total
