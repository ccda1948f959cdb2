"""Splitting a batch into micro-batches, and putting results together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from penstock.capture import Origin, Sizes, TensorInfo, Trace, Value
from penstock.capture.dims import Dim
from penstock.errors import InputError


def split(leaves: Sequence[Any], dims: Sequence[Dim], num_microbatches: int) -> list[list[Any]]:
    """The leaves of every micro-batch, as `torch.tensor_split` divides each leaf's dimension.

    Sizes differ by one at most, and no row is added or repeated. What has no dimension to split
    along is in every micro-batch whole.
    """
    parts = [
        [leaf] * num_microbatches if dim is None else _slices(leaf, num_microbatches, dim)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return [list(group) for group in zip(*parts, strict=True)]


def _slices(
    leaf: torch.Tensor, num_microbatches: int, dim: int | tuple[int, int]
) -> list[torch.Tensor]:
    """Views of a tensor, each with a version counter of its own.

    A model that changes its input in place then changes one micro-batch, and autograd does not
    take the others, which are in flight, for changed as well.
    """
    axis, per = dim if isinstance(dim, tuple) else (dim, 1)
    rows = split_rows(leaf.shape[axis] // per, num_microbatches)
    stops = list(accumulate(rows, initial=0))
    views = [leaf.narrow(axis, a * per, (b - a) * per) for a, b in pairwise(stops)]
    return [view if view.requires_grad else view.data for view in views]


def split_rows(rows: int, num_microbatches: int) -> list[int]:
    """The rows of every micro-batch, as `torch.tensor_split` divides them."""
    small, larger = divmod(rows, num_microbatches)
    return [small + 1] * larger + [small] * (num_microbatches - larger)


def merge(trace: Trace, values: Sequence[Value], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of a whole batch out of those of its micro-batches, in order.

    Args:
        trace: says along which dimension each value grows with the batch.
        values: what the last stage returns.
        results: for every micro-batch the results, in the order of `values`.
    """
    if len(results) == 1:
        return list(results[0])
    merged = []
    for k, value in enumerate(values):
        parts = [result[k] for result in results]
        dim = merge_dim(trace, value)
        merged.append(parts[0] if dim is None else torch.cat(parts, dim))
    return merged


def check_mergeable(trace: Trace, values: Sequence[Value], num_microbatches: int) -> None:
    """Raise unless the results of this many micro-batches can be put together.

    Raises:
        InputError: a value has no batch dimension, and there are several micro-batches.
    """
    if num_microbatches > 1:
        for value in values:
            merge_dim(trace, value)


def unmerge(
    trace: Trace, value: Value, gradient: torch.Tensor | None, sizes: Sequence[Sizes]
) -> Sequence[torch.Tensor | None]:
    """The gradient of a merged result, for each micro-batch."""
    if gradient is None or len(sizes) == 1:
        return [gradient] * len(sizes)
    dim = merge_dim(trace, value)
    if dim is None:
        return [gradient, *[None] * (len(sizes) - 1)]
    return list(gradient.split([trace.info(value).at(size)[dim] for size in sizes], dim))


def merge_dim(trace: Trace, value: Value) -> int | None:
    """The dimension along which a result is put together; `None` if it is the same for all.

    Raises:
        InputError: it differs from one micro-batch to another, and has no batch dimension.
    """
    info = trace.info(value)
    if isinstance(info, TensorInfo) and info.batch_dim is not None:
        return info.batch_dim
    if isinstance(info, TensorInfo) and info.origin is Origin.NOTHING:
        return None
    raise InputError(
        f"the model returns {info}, which has no batch dimension, so the results of several "
        "micro-batches cannot be put together. Use train_step(..., loss_fn=...) with a function "
        "that picks it (lambda output: output.loss), or num_microbatches=1"
    )
