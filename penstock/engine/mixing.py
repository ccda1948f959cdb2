"""What a pipeline says, once, of losses and models in which rows meet other rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from penstock.capture import Join
from penstock.errors import RowsWarning

_INSTEAD = (
    "loss_fn(pipe(x), target).backward() gives one loss of all rows, if the result can be put "
    "together (Pipeline(merge=)), and so does num_microbatches=1. Where it is meant by "
    'micro-batch, as in gradient accumulation: warnings.filterwarnings("ignore", '
    "category=penstock.RowsWarning)"
)


class Mixing:
    """What was said so far."""

    def __init__(self) -> None:
        self._losses: set[Any] = set()
        self._said: set[str] = set()

    def is_new(self, loss: Any) -> bool:
        """Whether a loss was not looked at yet."""
        return loss not in self._losses

    def of_loss(self, loss: Any, mismatch: tuple[float, float] | None, weight: Any) -> None:
        """A loss was looked at; warn if that of a micro-batch is not what its pieces make.

        Args:
            loss: the identity of the loss.
            mismatch: both values, if they differ.
            weight: how losses of micro-batches were weighed.
        """
        self._losses.add(loss)
        if mismatch is not None:
            whole, made = mismatch
            warnings.warn(
                f"the loss of a micro-batch is {whole:.6g}, but its rows in two pieces make "
                f"{made:.6g} with weight={_shown(weight)}, so a batch's loss depends on how it "
                "is split. If it is a mean over less than all rows (labels that are not ignored, "
                "say), give weight= a function that counts those, weight=lambda target: "
                "(target != -100).sum(), or None for a loss that is a sum. If it compares rows "
                f"with each other, it finds those of a micro-batch only: {_INSTEAD}",
                RowsWarning,
                stacklevel=4,
            )

    def of_model(self, joins: Sequence[Join]) -> None:
        """Warn if results that a loss will get have other rows in them."""
        for join in joins:
            if join.mixes and join.why not in self._said:
                self._said.add(join.why)
                warnings.warn(
                    f"the model returns {join.why}. The loss gets that of a micro-batch, in which "
                    f"only its own rows meet: {_INSTEAD}",
                    RowsWarning,
                    stacklevel=5,
                )


def _shown(weight: Any) -> str:
    return repr(weight) if weight is None or isinstance(weight, str) else "a function"
