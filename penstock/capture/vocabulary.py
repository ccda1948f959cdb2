"""Which functions of torch say what of a tensor, and what is plain data."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), Enum, range, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# Reading these says nothing of a tensor's values, so they are not calls of the program.
METADATA = frozenset(
    """
    shape dtype device ndim is_cuda is_cpu requires_grad layout is_sparse is_quantized is_meta
    is_mkldnn names grad_fn is_leaf itemsize nbytes is_mps is_xpu is_nested output_nr _version
    size dim stride is_contiguous numel nelement is_floating_point is_complex __len__ is_signed
    element_size storage_offset get_device has_names is_inference is_conj is_neg ndimension
    is_tensor __repr__ __hash__ __format__ _is_view is_same_size result_type can_cast
    promote_types broadcast_shapes dim_order is_shared is_pinned
    """.split()
)
# Those that say whether gradients flow to it.
GRADIENTS = frozenset(["requires_grad", "grad_fn", "is_leaf"])
# Those that say how large it is, and the calls whose number of results does.
# How it lies in memory, as far as that is a matter of strides.
LAYOUT = frozenset("stride is_contiguous dim_order".split())
# What Python may ask of an input besides, that batches may have different.
STATE = frozenset("is_inference storage_offset is_shared is_pinned is_conj is_neg _is_view".split())
SIZES = frozenset("shape size numel nelement __len__ nbytes stride is_contiguous".split())
# What a program cannot do across its cuts, or whose results no recording can follow: the names of
# the functions themselves.
CLOSING = {
    "grad": "computes gradients (torch.autograd.grad)",
    "backward": "computes gradients (backward)",
    "register_hook": "hangs hooks on tensors (register_hook)",
    "register_post_accumulate_grad_hook": "hangs hooks on tensors",
    "data_ptr": "asks for addresses (data_ptr)",
    "_pack_padded_sequence": "packs sequences, whose sizes depend on values",
}
PARTS = frozenset("unbind split chunk tensor_split split_with_sizes hsplit vsplit dsplit".split())


def is_plain(leaf: Any) -> bool:
    """Whether it is data that a program may have as a constant."""
    return isinstance(leaf, _PLAIN) or (callable(leaf) and not isinstance(leaf, nn.Module))
