"""Copies that lie in memory as what they are copies of, so that kernels compute the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

_ALIGNMENT = 64  # bytes; kernels may choose their way by it
_SPARSE = 2  # so many times as many elements, and what is between them is not copied


def extent(tensor: torch.Tensor) -> int:
    """The elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def alike(
    tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor], sparse: bool = False
) -> torch.Tensor:
    """A copy with the same strides and alignment, without history.

    A batch is split into views: one that begins in the midst of a larger tensor is often less
    aligned than memory of its own would be.

    Args:
        tensor: what is copied.
        copy: copies a tensor that lies in memory without gaps.
        sparse: whether to keep strides also if that copies more than twice as many elements.
    """
    tensor = tensor.detach()
    is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    reach = extent(tensor) if is_plain else 0
    if not reach or (reach > _SPARSE * tensor.numel() and not sparse):
        return copy(tensor)
    before = tensor.data_ptr() % _ALIGNMENT // tensor.itemsize
    before = min(before, int(tensor.storage_offset()))
    if not before and tensor.is_contiguous():
        return copy(tensor)
    flat = (before + reach,), (1,), tensor.storage_offset() - before
    return copy(tensor.as_strided(*flat)).as_strided(tensor.shape, tensor.stride(), before)
