"""Copies that lie in memory as what they are copies of, so that kernels compute the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

ALIGNMENT = 256
"""Bytes: libraries choose kernels by the alignment of addresses, cuBLAS by up to this much."""

_SPARSE = 2  # strides that span more than this many times the elements are kept only on request


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
        sparse: whether to keep strides even if that copies more than twice as many elements.
        to: the device of the copy, if it is not the tensor's. If it is of another kind, addresses
            there are unrelated: the copy is aligned by the tensor's offset in its storage.
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
