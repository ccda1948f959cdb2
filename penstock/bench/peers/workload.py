"""What every peer trains: a model, a synthetic batch, a loss, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Build = Callable[[], nn.Module]
Data = Callable[[], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """One training step, the same for every peer; it can be pickled.

    Attributes:
        build: makes the model, with the same weights every time; picklable.
        data: makes the batch and its target, with as many rows; picklable.
        loss: `loss(output, target)`, a mean over rows; picklable.
        num_microbatches: in how many equal pieces the batch is run.
        learning_rate: of SGD without momentum.
        devices: of the ranks, by number; CPUs if there are none.
        autocast: to which dtype; `None` for none.

    Raises:
        ValueError: the batch does not divide into equal micro-batches.
    """

    build: Build
    data: Data
    loss: Loss
    num_microbatches: int = 1
    learning_rate: float = 0.001
    devices: tuple[str, ...] = ()
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        rows, count = len(self.data()[0]), self.num_microbatches
        if count < 1 or rows % count:
            raise ValueError(
                f"a batch of {rows} is not {count} equal micro-batches, "
                "which not every peer can run; choose a divisor of the batch"
            )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD, without momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate)

    def modes(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of every forward and loss on a device."""
        return (
            nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)
        )
