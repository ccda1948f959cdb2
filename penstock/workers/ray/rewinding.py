"""The script's model, taken back to what it was when a copy of its actors was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

SentModule = Mapping[str, Packed | None]
"""The attributes of a module by their names, as they were sent; `None` if they cannot be packed."""


class SentAttributes:
    """The plain attributes of modules, as workers were last sent them.

    Args:
        model: the whole model; its modules and tensors are referred to.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known = [*model.modules(), *(tensor for _, tensor in named_tensors(model))]
        self._numbers = {id(each): number for number, each in enumerate(self._known)}
        self._packed: dict[int, SentModule] = {}

    def packed(self, modules: Mapping[int, nn.Module]) -> dict[int, SentModule]:
        """What modules, by their numbers, have now; for `have`."""
        return {number: self._packed_of(module) for number, module in modules.items()}

    def _packed_of(self, module: nn.Module) -> SentModule:
        own = attributes_of(module).items()
        return {name: self._pack(value) for name, value in own if name not in INTERNAL}

    def _pack(self, value: Any) -> Packed | None:
        try:
            data, tensors = pack_apart(value, self._numbers)
        except Exception:  # the module has left it out where it was sent
            return None
        return Packed(data, [tensor.detach().clone() for tensor in tensors])

    def have(self, packed: Mapping[int, SentModule]) -> None:
        """The workers have these modules, by their numbers, with these attributes."""
        self._packed.update(packed)

    def as_sent(self, changes: AttributeChanges) -> AttributeChanges:
        """The values with which changed attributes were last sent, as far as they are known."""
        found: dict[int, dict[str, Any]] = {}
        for number in changes.keys() & self._packed.keys():
            sent = self._packed[number]
            found[number] = {name: MISSING for name in changes[number] if name not in sent}
            for name in changes[number]:
                if (packed := sent.get(name)) is not None:
                    objects = [*packed.tensors, *reversed(self._known)]
                    found[number][name] = unpack_with(packed.data, objects.__getitem__)
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
        """While open, the model is as in the copy; afterwards as the script has changed it since.

        Attributes that change while it is open have the new values when it is opened again.
        """
        self._set_requires_grad(False)
        self._model.go_back(self._found.values, self._found.gradients)
        self._have(self._before)
        try:
            yield
        finally:
            self._before = self._present(self._before)
            self._have(self._attributes)
            self._set_requires_grad(True)
            self._put_back()

    def _set_requires_grad(self, now: bool) -> None:
        for each in self._since:
            for number, wanted in each.requires_grad.items():
                self._model.tensors[number].requires_grad_(wanted is now)

    def _present(self, attributes: AttributeChanges) -> AttributeChanges:
        """What these attributes are now."""
        own = {number: attributes_of(self._modules[number]) for number in attributes}
        return {
            number: {name: own[number].get(name, MISSING) for name in names}
            for number, names in attributes.items()
        }

    def _have(self, attributes: AttributeChanges) -> None:
        for number, values in attributes.items():
            own = attributes_of(self._modules[number])
            for name, value in values.items():
                if value is MISSING:
                    own.pop(name, None)
                else:
                    own[name] = value

    @torch.no_grad()
    def _put_back(self) -> None:
        """What the script has done to tensors since."""
        for number, value in self._written.items():
            self._model.tensors[number].copy_(value)
        for each in self._since:
            for number, gradient in each.gradients.items():
                self._model.tensors[number].grad = None if gradient is None else gradient.clone()
            for number in each.zeroed:
                if (present := self._model.tensors[number].grad) is not None:
                    present.zero_()
