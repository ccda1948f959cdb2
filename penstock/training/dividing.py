"""How the parameters of an optimizer are divided among the workers that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.workers.backend import Workers
from penstock.workers.optimizer_parts import Groups, Parts


class Dividing:
    """Makes the workers' parts of optimizers; it does not keep the pipeline alive.

    Args:
        model: whose parameters they update.

    Attributes:
        workers: that there are now.
    """

    workers: Workers

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(
        self, kind: type[torch.optim.Optimizer], groups: Groups, options: Mapping[str, Any]
    ) -> Parts:
        """The parts of one optimizer."""
        return self.workers.optimizer(kind, groups, options, self._owned())

    def _owned(self) -> list[list[nn.Parameter]]:
        """The parameters of every worker; the first also owns those that no stage uses."""
        every = self.workers.ownership.owned()
        owned = [[p for p in tensors if isinstance(p, nn.Parameter)] for tensors in every]
        seen = {id(p) for own in owned for p in own}
        owned[0] += [p for p in self._model.parameters() if id(p) not in seen]
        return owned
