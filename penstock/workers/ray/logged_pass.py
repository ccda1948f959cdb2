"""Passes in the log of what actors have done, from which they are run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.devices.settings import TorchSettings
from penstock.engine.orders import Order
from penstock.workers.ray.model import ScriptChanges
from penstock.workers.ray.pickled import Pickled, pickled, unpickled
from penstock.workers.redo import Work

if TYPE_CHECKING:
    from penstock.workers.backend import Workers


@dataclass(frozen=True)
class LoggedPass:
    """A pass as it was begun.

    Attributes:
        order: without what enters it, and without its loss.
        whole: the order with everything that comes from the script, which may change that later.
        wanted: the parameters whose gradients are computed; `None` for all.
        modules: that workers have.
        modes: whether each of these was in training mode.
        noted: what the script had done to gradients before it.
        settings: of torch.
    """

    order: Order
    whole: Pickled
    wanted: Sequence[nn.Parameter] | None
    modules: Sequence[nn.Module]
    modes: Sequence[bool]
    noted: ScriptChanges
    settings: TorchSettings

    @classmethod
    def of(cls, order: Order, modules: Sequence[nn.Module], noted: ScriptChanges) -> LoggedPass:
        """A pass that begins now."""
        values = [tuple(map(as_leaf, each)) for each in order.values]
        whole = order.changed(wanted=None, values=values, recorded=False, profiled=False)
        return cls(
            order.changed(values=(), loss=None, gradients={}, wanted=None),
            pickled(whole),
            order.wanted,
            modules,
            [module.training for module in modules],
            noted,
            TorchSettings.here(),
        )

    def work(self) -> Work:
        """The same in a log."""
        return Work(self._redo, self.order, self.whole.nbytes)

    def _redo(self, workers: Workers) -> None:
        order: Order = unpickled(self.whole).changed(wanted=self.wanted)
        self.noted.redo()
        pairs = list(zip(self.modules, self.modes, strict=False))  # more may have come since
        now = [module.training for module, _ in pairs]
        settings = TorchSettings.here()
        try:
            self.settings.apply()
            for module, training in pairs:
                module.training = training
            workers.start(order).finish()
        finally:
            for (module, _), training in zip(pairs, now, strict=True):
                module.training = training
            settings.apply()


def as_leaf(value: Any) -> Any:
    """A tensor without its history, which asks for a gradient if it did; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
