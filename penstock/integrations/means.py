"""The loss of a batch that was evaluated in micro-batches, from the losses of these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_ROUNDING = 1e-6  # the relative error of a sum of a few losses
_SAME = 0.02  # the largest relative difference that another split causes in low precision
_MOST_RUNS = 8


class MeanLoss:
    """Finds the weights with which the losses of micro-batches add up to that of the batch.

    A model may return the mean over its labels, over the tokens that follow others, or over rows;
    nothing says which. So the first batches for which these means differ are run whole as well.

    Args:
        name: the model's class.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._possible = ["labels", "next tokens", "rows"]  # until a batch has shown otherwise
        self._runs = 0  # of whole batches, so far

    def shares(
        self,
        batch: Mapping[Any, Any],
        losses: Sequence[torch.Tensor],
        rows: Sequence[int],
        whole: Callable[[], torch.Tensor],
    ) -> list[float]:
        """The share of every micro-batch in the loss of the batch; they add up to 1.

        Args:
            batch: the model's arguments by name.
            losses: of the micro-batches.
            rows: of the micro-batches.
            whole: runs the batch as one micro-batch, and returns the loss.
        """
        ways = {name: normalized(counts) for name, counts in _counts(batch, rows).items()}
        possible = [name for name in self._possible if name in ways] or ["rows"]
        if len(possible) > 1 or not self._runs:
            totals = {name: weighed(losses, ways[name]).item() for name in possible}
            possible = self._fitting(totals, whole)
        return ways[possible[0]]

    def _fitting(self, totals: Mapping[str, float], whole: Callable[[], torch.Tensor]) -> list[str]:
        """The kinds of mean that give the loss of the whole batch; all if this batch cannot decide.

        Args:
            totals: the loss of the batch by each kind of mean.
            whole: runs the batch as one micro-batch, and returns the loss.
        """
        first, *others = totals.values()
        differ = not all(math.isclose(first, other, rel_tol=_ROUNDING) for other in others)
        is_run = not self._runs or (differ and self._runs < _MOST_RUNS)
        loss = whole().item() if is_run else math.nan
        if not math.isfinite(loss):
            return list(totals)
        self._runs += 1
        off = {n: math.inf if math.isnan(t) else abs(t - loss) for n, t in totals.items()}
        least = min(off.values())
        if least <= _SAME * abs(loss):
            most = 4 * least + _ROUNDING * abs(loss)  # others are farther than rounding explains
            self._possible = [name for name in totals if off[name] <= most]
        else:
            self._possible = ["rows"]
            warnings.warn(
                f"the loss of {self._name} is {loss:.6g} for a whole batch, which is no mean of "
                f"those of its micro-batches ({first:.6g}), which evaluation reports. For losses "
                "of whole batches, as the plain Trainer has them, use "
                'pipeline={"num_microbatches": 1}',
                stacklevel=2,
            )
        return self._possible


def _counts(batch: Mapping[Any, Any], rows: Sequence[int]) -> dict[str, list[int]]:
    """For each kind of mean, how many of what it is taken over every micro-batch has.

    Labels of -100 are not counted, as the losses of transformers and torch ignore them.
    """
    found = {"rows": list(rows)}
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.ndim:
        return found
    counted = labels.ne(-100)
    kinds = {"labels": counted} | ({"next tokens": counted[..., 1:]} if labels.ndim > 1 else {})
    for name, each in kinds.items():
        counts = [int(part.sum()) for part in each.split(list(rows))]
        if any(counts):
            found[name] = counts
    return found


def normalized(counts: Sequence[int]) -> list[float]:
    """Shares that add up to 1."""
    return [count / sum(counts) for count in counts]


def weighed(losses: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """The sum of losses, each times its share; those of no share are left out, and may be NaN."""
    parts = [loss * share for loss, share in zip(losses, shares, strict=True) if share]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
