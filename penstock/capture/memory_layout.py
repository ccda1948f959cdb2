"""How a tensor lies in memory, as far as the Python of a model can ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What strides say besides the shape: whether there are gaps, and the order of dimensions.

    Returns:
        `("contiguous",)`; `("dense", dims)`; `("apart", dims)`, with gaps or overlaps; or the name
        of a layout that is not strided. `dims` has the dimension with the largest stride first.
    """
    if tensor.layout is not torch.strided:
        return (str(tensor.layout),)
    if tensor.is_contiguous():
        return ("contiguous",)
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return "dense" if dense else "apart", _order(tensor)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions, the one with the largest stride first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


def laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its values laid out in memory like another one.

    Args:
        tensor: the tensor; returned itself if `other` is contiguous or not strided.
        other: has the order of dimensions, and the gaps if there are any; of the same rank.
    """
    kind, *order = layout(other)
    if kind not in ("dense", "apart"):
        return tensor
    dims: Sequence[int] = order[0]
    if kind == "apart":  # one entry more than there are, along all dimensions
        sizes = [tensor.shape[d] + 1 for d in dims]
        room = tensor.new_empty(sizes).permute([dims.index(d) for d in range(tensor.ndim)])
        return room[tuple(slice(n) for n in tensor.shape)].copy_(tensor)
    copied = tensor.permute(*dims).contiguous()
    return copied.permute([dims.index(d) for d in range(tensor.ndim)])
