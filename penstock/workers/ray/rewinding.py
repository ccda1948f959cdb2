"""The script's model, taken back to what it was when a copy of its actors was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import named_tensors
from penstock.capture.places import INTERNAL, MISSING, attributes_of
from penstock.links.pickling import Packed, pack_apart, unpack_with
from penstock.workers.following import AttributeChanges
from penstock.workers.ray.copying import Gathered
from penstock.workers.ray.jobs import TensorChanges
from penstock.workers.ray.model import DriverModel


class SentAttributes:
    """The plain attributes of modules, as workers were last sent them.

    Args:
        model: the whole model; its modules and tensors are referred to.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known = [*model.modules(), *(tensor for _, tensor in named_tensors(model))]
        self._numbers = {id(each): number for number, each in enumerate(self._known)}
        self._packed: dict[int, Packed] = {}

    def note(self, number: int, module: nn.Module) -> None:
        """The workers have this module, by its number, as it is now."""
        own = {k: v for k, v in attributes_of(module).items() if k not in INTERNAL}
        try:
            data, tensors = pack_apart(own, self._numbers)
        except Exception:  # no worker could be sent it, so that it is not followed either
            self._packed.pop(number, None)
        else:
            self._packed[number] = Packed(data, [tensor.detach().clone() for tensor in tensors])

    def as_sent(self, changes: AttributeChanges) -> AttributeChanges:
        """What the attributes were that are others now."""
        found: dict[int, dict[str, Any]] = {}
        for number, names in changes.items():
            if number in self._packed:
                data, tensors = self._packed[number]
                own = unpack_with(data, [*tensors, *reversed(self._known)].__getitem__)
                found[number] = {name: own.get(name, MISSING) for name in names}
        return found


class Rewinding:
    """Takes the script's model back to what its actors were like when a copy of them was made.

    Args:
        model: the script's.
        found: the copy.
        since: what the script has done to tensors since, and the actors do not know yet.
        modules: of the model, by number.
        attributes: of these, that the script has changed since.
        sent: what they were before.
    """

    def __init__(
        self,
        model: DriverModel,
        found: Gathered,
        since: Sequence[TensorChanges],
        modules: Sequence[nn.Module],
        attributes: AttributeChanges,
        sent: SentAttributes,
    ) -> None:
        self._model, self._found, self._modules = model, found, modules
        self._since = since
        self._written = {n: v.clone() for each in since for n, v in each.values.items()}
        self._attributes, self._before = attributes, sent.as_sent(attributes)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While open it is so; afterwards it is again what the script has made of it."""
        self._set_requires_grad(False)
        self._model.go_back(self._found.values, self._found.gradients)
        self._have(self._before)
        try:
            yield
        finally:
            self._have(self._attributes)
            self._set_requires_grad(True)
            self._do_again()

    def _set_requires_grad(self, now: bool) -> None:
        for each in self._since:
            for number, wanted in each.requires_grad.items():
                self._model.tensors[number].requires_grad_(wanted is now)

    def _have(self, attributes: AttributeChanges) -> None:
        for number, values in attributes.items():
            own = attributes_of(self._modules[number])
            for name, value in values.items():
                if value is MISSING:
                    own.pop(name, None)
                else:
                    own[name] = value

    @torch.no_grad()
    def _do_again(self) -> None:
        """What the script has done to tensors since."""
        for number, value in self._written.items():
            self._model.tensors[number].copy_(value)
        for each in self._since:
            for number, gradient in each.gradients.items():
                self._model.tensors[number].grad = None if gradient is None else gradient.clone()
            for number in each.zeroed:
                if (present := self._model.tensors[number].grad) is not None:
                    present.zero_()
