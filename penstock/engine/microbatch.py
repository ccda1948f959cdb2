"""Splitting a batch into micro-batches, and putting results together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch

from penstock.capture import Join
from penstock.capture.dims import Dim
from penstock.errors import InputError
from penstock.profile.rows import split_rows

Merge = Literal["auto", "rows", "list"] | Callable[[list[Any]], Any]
"""How the results of micro-batches become that of the batch, see `Pipeline`."""


def check_merge(merge: object) -> None:
    """Raise unless it is a way to put results together.

    Raises:
        InputError: it is not.
    """
    if merge not in ("auto", "rows", "list") and not callable(merge):
        raise InputError(
            f'merge={merge!r} is unknown; choose "auto", "rows", "list", or a function of the list '
            "of the micro-batches' results"
        )


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


def pieces_of(
    values: Sequence[Any], dims: Sequence[int | None], rows: Sequence[int]
) -> list[list[Any]]:
    """The values of every piece, without history: copies of its rows.

    Args:
        values: tensors, or anything else.
        dims: for each the dimension that grows with the rows; `None` for values that all pieces
            share, which are not copied.
        rows: the number of rows of every piece.
    """
    parts = []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if dim is None:
            parts.append([value] * len(rows))
        else:
            per = value.shape[dim] // sum(rows)
            pieces = value.split([n * per for n in rows], dim)
            parts.append([piece.clone() for piece in pieces])
    return [list(group) for group in zip(*parts, strict=True)] or [[] for _ in rows]


def repeated(values: Sequence[Any], dims: Sequence[int | None], copies: int) -> list[Any]:
    """The values with their rows repeated `copies` times.

    Args:
        values: tensors, or anything else.
        dims: for each the dimension along which it is repeated; with `None` it stays as it is.
        copies: how often each row occurs in the result.
    """
    return [
        value if dim is None or copies == 1 else torch.cat([value.detach()] * copies, dim)
        for value, dim in zip(values, dims, strict=True)
    ]


def check_mergeable(joins: Sequence[Join], anyway: bool = False) -> None:
    """Raise unless the results of several micro-batches can be put together.

    Args:
        joins: for every leaf of the result how it is.
        anyway: whether it is done wherever sizes allow it, though the model as a whole would give
            something else.

    Raises:
        InputError: one cannot be.
    """
    for join in joins:
        sizes_allow = join.dim is not None
        if join.why and not (anyway and sizes_allow):
            rows = ', "rows" to concatenate them anyway' if sizes_allow else ""
            raise InputError(
                f"the model returns {join.why}, so the results of several micro-batches cannot be "
                "put together to that of the whole batch. For a loss, use train_step or eval_step "
                "(loss_fn=lambda output: output.loss picks the model's own). For the results, "
                f'give Pipeline(merge=) a function of their list, "list" for the list itself{rows}'
                "; or use num_microbatches=1"
            )


def merge(joins: Sequence[Join], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of a whole batch out of those of its micro-batches, in order.

    Args:
        joins: for every value how it is put together.
        results: for every micro-batch the values.

    Raises:
        InputError: they differ in other sizes than the number of rows.
    """
    if len(results) == 1:
        return list(results[0])
    parts = zip(*results, strict=True)
    return [
        each[0] if join.dim is None else _concatenated(each, join.dim)
        for join, each in zip(joins, parts, strict=True)
    ]


def _concatenated(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    axis = dim % parts[0].ndim
    others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
    if len(others) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise InputError(
            f"the results of the micro-batches have the shapes {shapes}, which differ not only in "
            f"dimension {axis}, the rows: their sizes depend on values, such as the longest row of "
            "each. Let the model fill them up to a size of its inputs (total_length= of "
            "pad_packed_sequence), or give Pipeline(merge=) a function of their list, "
            '"list" for the list itself. The losses of train_step and eval_step do not need it'
        )
    return torch.cat(list(parts), dim)
