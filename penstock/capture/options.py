"""What a capture is told besides the model and its example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.opening import capture
from penstock.capture.program import Program


@dataclass(frozen=True)
class CaptureOptions:
    """How a forward is recorded, see `penstock.capture`.

    Attributes:
        batch_dim: the dimension that counts the rows.
        dynamic: other dimensions that vary from batch to batch.
        keep_closed: qualified names of modules that must stay whole.
    """

    batch_dim: BatchDim
    dynamic: Dynamic | None
    keep_closed: Iterable[str]

    def capture(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Program:
        """The program of a model, from an example of its arguments.

        Raises:
            CaptureError, InputError: as `penstock.capture` does.
        """
        return capture(
            model,
            args,
            kwargs,
            batch_dim=self.batch_dim,
            dynamic=self.dynamic,
            keep_closed=self.keep_closed,
        )
