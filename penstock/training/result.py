"""What a training step gives, if more than the loss was asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StepResult(NamedTuple):
    """The loss of a step, and what else was asked for.

    Attributes:
        loss: the batch's loss, a detached scalar.
        outputs: the model's result for the batch, as `pipe(x)` would give it, without history; for
            `train_microbatches` a list of one for each. `None` if they were not asked for.
        metrics: what the metrics function returned for every micro-batch, in order, without
            history. `None` if there was none.
    """

    loss: torch.Tensor
    outputs: Any = None
    metrics: list[Any] | None = None
