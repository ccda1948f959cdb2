"""Whether the rows of a result are where the unsplit model has them."""

from __future__ import annotations

from typing import Any

import torch

from penstock.comparison.verify_report import Comparison
from penstock.oracle import tensors


def rows_in_order(ours: Any, theirs: Any) -> Comparison:
    """Compare a result that was put together from micro-batches with that of the unsplit model.

    Kernels may round differently for another number of rows, so bits prove nothing here. Instead
    no row of the unsplit result may be nearer to a row than the one in its own place is, by more
    than rounding explains. Every dimension that could be that of the rows is looked at. It is not
    asked of models that decide otherwise on a micro-batch than on the whole batch.
    """
    what = "rows of a call in evaluation mode, next to those of the unsplit model"
    pairs = list(zip(tensors(ours), tensors(theirs), strict=True))
    different = [str(k) for k, (mine, other) in enumerate(pairs) if not _in_order(mine, other)]
    return Comparison(what, len(pairs), tuple(different), float("inf") if different else 0.0)


def _in_order(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if torch.equal(ours, theirs):
        return True
    eps = torch.finfo(ours.dtype).eps if ours.dtype.is_floating_point else 0.0
    dims = range(ours.ndim)
    return ours.ndim > 0 and all(_nearest(ours, theirs, dim, eps) for dim in dims)


def _nearest(ours: torch.Tensor, theirs: torch.Tensor, dim: int, eps: float) -> bool:
    """Whether the nearest to each entry along a dimension is in the same place, or as near."""
    mine, other = (
        t.movedim(dim, 0).flatten(1) if t.ndim > 1 else t[:, None] for t in (ours, theirs)
    )
    mine, other = (t.detach().abs() if t.is_complex() else t.detach() for t in (mine, other))
    mine, other = (t.double().nan_to_num() for t in (mine, other))
    if not mine.numel():
        return True
    apart = torch.cdist(mine, other, compute_mode="donot_use_mm_for_euclid_dist")
    noise = eps**0.5 * float(other.norm(dim=1).max())
    return bool((apart.diagonal() <= apart.min(dim=1).values + noise).all())
