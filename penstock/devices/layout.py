"""Copies that lie in memory as what they are copies of, so that kernels compute the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

ALIGNMENT = 256
"""Bytes; kernels choose their way by it, those of cuBLAS by as many."""

_SPARSE = 2  # so many times as many elements, and what is between them is not copied


def extent(tensor: torch.Tensor) -> int:
    """The elements from the first to the last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def alike(
    tensor: torch.Tensor,
    copy: Callable[[torch.Tensor], torch.Tensor],
    sparse: bool = False,
    to: torch.device | None = None,
) -> torch.Tensor:
    """A copy with the same strides and alignment, without history.

    A batch is split into views: one that begins in the midst of a larger tensor is often less
    aligned than memory of its own would be.

    Args:
        tensor: what is copied.
        copy: copies a tensor that lies in memory without gaps.
        sparse: whether to keep strides also if that copies more than twice as many elements.
        to: where the copy will be, if not where the tensor is. Memory begins at other addresses on
            devices of another kind: there it is aligned as a part of the same whole would be.
    """
    tensor = tensor.detach()
    is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    reach = extent(tensor) if is_plain else 0
    if not reach or (reach > _SPARSE * tensor.numel() and not sparse):
        return copy(tensor)
    begin = int(tensor.storage_offset())
    is_other = to is not None and to.type != tensor.device.type
    at = begin * tensor.itemsize if is_other else tensor.data_ptr()
    before = min(at % ALIGNMENT // tensor.itemsize, begin)
    if not before and tensor.is_contiguous():
        return copy(tensor)
    flat = (before + reach,), (1,), begin - before
    return copy(tensor.as_strided(*flat)).as_strided(tensor.shape, tensor.stride(), before)
