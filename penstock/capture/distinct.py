"""Rows that differ, for finding out what a model does with rows.

A dummy batch of zeros or ones has rows that are alike, and whatever a model does with these looks
right: rows in reverse order, sorted, or less their mean over the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.capture.dims import Dim

Rows = Mapping[int, list[torch.Tensor]]
"""The rows of every leaf that has any, by the index of the leaf."""


def with_distinct_rows(leaves: Sequence[Any], dims: Sequence[Dim]) -> list[Any]:
    """Inputs whose rows differ; a leaf that needs no change is returned as the same object.

    In a floating-point leaf, a row that equals an earlier one is changed: its numbers shrink by up
    to a half, and its zeros become numbers up to a half. In leaves of integers and booleans, a row
    is changed only if it equals an earlier one in all leaves: positive numbers stay between zero
    and their value, zeros become zero or one.

    Args:
        leaves: the leaves of the inputs; they are not changed.
        dims: for every leaf the dimension that counts its rows, as in `Varying.batch_dims`.
    """
    rows = _rows_of(leaves, dims)
    changed: dict[int, dict[int, torch.Tensor]] = {}
    for place, own in rows.items():
        if own[0].is_floating_point() or own[0].is_complex():
            again = {k: _times_before(own, k) for k in range(1, len(own))}
            changed[place] = {k: _scaled(own[k], n) for k, n in again.items() if n}
    alike = [k for k in range(1, len(next(iter(rows.values()), []))) if _is_alike(rows, changed, k)]
    for place, own in rows.items():
        if place not in changed:
            changed[place] = {k: _stepped(own[k], n) for n, k in enumerate(alike, 1)}
    result = list(leaves)
    for place, new in changed.items():
        if new:
            dim = dims[place]
            axis = dim[0] if isinstance(dim, tuple) else dim
            parts = [new.get(k, row) for k, row in enumerate(rows[place])]
            result[place] = torch.cat(parts, axis or 0)
    return result


def _rows_of(leaves: Sequence[Any], dims: Sequence[Dim]) -> Rows:
    rows = {}
    for place, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is not None and leaf.layout is torch.strided and leaf.numel():
            axis, per = dim if isinstance(dim, tuple) else (dim, 1)
            rows[place] = list(leaf.split(per, axis))
    return rows


def _times_before(rows: Sequence[torch.Tensor], k: int) -> int:
    """How many earlier rows are equal to row `k`."""
    return sum(torch.equal(rows[k], earlier) for earlier in rows[:k])


def _is_alike(rows: Rows, changed: Mapping[int, Mapping[int, torch.Tensor]], k: int) -> bool:
    """Whether row `k` equals one earlier row in all leaves, and no leaf has a changed row `k`."""
    if any(k in new for new in changed.values()):
        return False
    return any(all(torch.equal(own[k], own[j]) for own in rows.values()) for j in range(k))


def _scaled(row: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    share = (torch.rand(row.shape, generator=generator) / 2).to(row.device)
    wide = row if row.element_size() >= 4 else row.float()
    return torch.where(wide == 0, share.to(wide.dtype), wide * (1 - share)).to(row.dtype)


def _stepped(row: torch.Tensor, times: int) -> torch.Tensor:
    """A row of integers changed `times` steps: positive ones stay between zero and their value.

    Zeros at every second place become ones. These are valid as indices, too, unless a table has a
    single row. Off the CPU, where a wrong index is fatal, a row of zeros is returned unchanged.
    """
    if row.device.type != "cpu" and not row.any():
        return row
    places = torch.arange(row.numel(), device=row.device).view(row.shape)
    steps = places + times
    values = row.long()
    lower = torch.where(values > 0, (values - steps).remainder(values.clamp(min=0) + 1), values)
    return torch.where(values == 0, steps % 2, lower).to(row.dtype)
