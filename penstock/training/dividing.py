"""How the parameters of an optimizer are divided among the workers that there are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.training.parameter_groups import not_of_the_model
from penstock.workers.backend import Workers
from penstock.workers.optimizer_parts import Groups, Parts
from penstock.workers.ownership import Ownership


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
        self._ways: tuple[Ownership, int] | None = None
        self._owners: list[list[int]] = []
        self._number = 0

    @property
    def number(self) -> int:
        """Of the division: another one if a new way has let workers own other parameters."""
        ways = self.workers.ownership, self.workers.ownership.ways
        if ways != self._ways:
            owners = [[id(parameter) for parameter in own] for own in self._owned()]
            self._number += owners != self._owners
            self._ways, self._owners = ways, owners
        return self._number

    def __call__(
        self, kind: type[torch.optim.Optimizer], groups: Groups, options: Mapping[str, Any]
    ) -> Parts:
        """The parts of one optimizer.

        Raises:
            InputError: a group has a parameter that is not the model's.
        """
        owned = self._owned()
        known = {id(p) for own in owned for p in own}
        for parameter in chain.from_iterable(group["params"] for group in groups):
            if id(parameter) not in known:
                raise not_of_the_model(parameter)
        return self.workers.optimizer(kind, groups, options, owned)

    def _owned(self) -> list[list[nn.Parameter]]:
        """The parameters of every worker; the first also owns those that no stage uses."""
        every = self.workers.ownership.owned()
        owned = [[p for p in tensors if isinstance(p, nn.Parameter)] for tensors in every]
        seen = {id(p) for own in owned for p in own}
        owned[0] += [p for p in self._model.parameters() if id(p) not in seen]
        return owned
