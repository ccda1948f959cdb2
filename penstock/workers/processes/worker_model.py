"""What the driver knows of the model that a worker's process has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from penstock.engine.batchnorm import Statistics, move
from penstock.links.pickling import Outbox
from penstock.workers.following import AttributeChanges, Following, Unchanged
from penstock.workers.processes.shared_model import Crossing, Package, SharedModel

_TRAINING = attrgetter("training")


class WorkerModel:
    """What a worker's process has of the model; the same for its place in all replicas.

    Args:
        place: of the worker in its replica.
        shared: the tensors that it shares with the driver.
        model: the whole model.

    Attributes:
        modules: those that it has copies of, in the order in which they were sent.
        outbox: packs what it is sent.
    """

    def __init__(self, place: int, shared: SharedModel, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.outbox = Outbox(self.number)
        self._place = place
        self._shared = shared
        self._model = model
        self._of_model = {id(module) for module in model.modules()}
        self._packages: list[Package] = []
        self._training: tuple[bool, ...] = ()
        self._unchanged = Unchanged(model)
        self._following = Following(self.shares)

    def number(self, tensor: Any) -> int | None:
        """The number by which it knows a tensor; `None` if it does not."""
        return self._shared.number(self._place, tensor)

    def shares(self, tensor: Any) -> bool:
        """Whether a tensor is in memory that it maps as well."""
        return self.number(tensor) is not None

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move tensors to memory that it maps as well, with the next packages."""
        self._packages += self._shared.share(self._place, tensors)

    def show(self, links: Mapping[int, Sequence[torch.Tensor]]) -> Crossing:
        """Let it name tensors to other workers, or be named them, see `SharedModel.show`."""
        return self._shared.show(self._place, links)

    def packages(self) -> list[Package]:
        """The tensors that it does not know of yet; from now on it does."""
        packages, self._packages = self._packages, []
        return packages

    def add(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Note that it gets these modules; returns those that are the model's and new to it."""
        known = {id(module) for module in self.modules}
        new = [m for m in modules if id(m) in self._of_model and id(m) not in known]
        self.modules += new
        self._unchanged.add(new, self.shares)
        self._following.add(new)
        return new

    def check(self) -> None:
        """Raise if a tensor or a hook that the process has was replaced in the driver.

        Raises:
            InputError: one was.
        """
        self._unchanged.check()
        self._shared.check(self._place)

    def move_batchnorms(self, seen: Sequence[Mapping[int, Mapping[int, list[Statistics]]]]) -> None:
        """Move running statistics by those that replicas have seen, see `Outcome.statistics`."""
        every: dict[Any, dict[int, list[Statistics]]] = {}
        for of_replica in seen:
            for number, found in of_replica.items():
                every.setdefault(self.modules[number], {}).update(found)
        move(every)

    def has_changes(self) -> bool:
        """Whether modes or attributes of its modules may have to be sent to it."""
        return self._modes() != self._training or self._following.has_changes()

    def _modes(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self.modules))

    def training(self) -> tuple[bool, ...] | None:
        """For every module whether it is in training mode; `None` if the process knows that."""
        now = self._modes()
        if now == self._training:
            return None
        self._training = now
        return now

    def changes(self) -> AttributeChanges:
        """The attributes of its modules that have changed, see `Following.changes`."""
        return self._following.changes()

    def confirm(self) -> None:
        """Note that what was sent has arrived."""
        self._following.confirm()

    def resend(self) -> None:
        """Take it that what was sent and not confirmed is lost."""
        self._training = ()
        self._following.resend()
