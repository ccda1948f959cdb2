"""The script's model, of whose tensors workers of the cluster have their own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import named_tensors
from penstock.errors import InputError
from penstock.links.segment import place_of
from penstock.workers.ray.gradients import GradientElsewhere
from penstock.workers.ray.jobs import Delivery, TensorChanges
from penstock.workers.state_hook import StateHook
from penstock.workers.tensors import Shared, described, hooks_of_tensors

_AGAIN = (
    "pipe.fetch() brings all of it here, and pipe.state_dict() does so, too; pipe.save(folder) "
    "writes a checkpoint where the weights are"
)


class DriverModel:
    """What the script has of a model, and what workers know of that.

    A worker has the tensors of its stages. What the script changes in place is sent to it with the
    next job. What the worker changes comes here when it is fetched; until then it is stale here.

    Args:
        model: the script's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._places: list[int | None] = []  # where each of them is, as a value
        self._versions: list[tuple[int, int]] = []  # as workers know them: and the address
        self._kinds: list[tuple[Any, ...]] = []  # their shapes and dtypes
        self._requires_grad: list[bool] = []
        self._hooks: list[Any] = []  # of them all
        self._stand_ins: dict[int, GradientElsewhere] = {}
        self._unsure: dict[int, _Draft] = {}  # by place: sent, but perhaps lost
        self._again: dict[int, _Draft] = {}  # lost, perhaps, and not yet sent again
        self.stale: set[int] = set()
        self._noted = ScriptChanges()  # that are not kept from being lost yet
        self._is_closed = False
        self._is_sending = False
        hook = StateHook(model, self.check_read)
        self._handles = [m.register_state_dict_pre_hook(hook) for m in model.modules()]
        self._watched = weakref.WeakSet(model.modules())

    # -- numbers and places -----------------------------------------------------------------

    def number(self, tensor: Any) -> int | None:
        """The number by which workers know a tensor; `None` if they do not."""
        return self._numbers.get(id(tensor))

    def number_at(self, place: int, tensor: Any) -> int | None:
        """The number of a tensor, if the workers at this place have its values."""
        number = self.number(tensor)
        return number if number is not None and self._places[number] == place else None

    def numbers(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The numbers of those tensors that workers know."""
        found = (self.number(tensor) for tensor in tensors)
        return [number for number in found if number is not None]

    def knows(self, tensor: Any) -> bool:
        """Whether workers know a tensor."""
        return id(tensor) in self._numbers

    def at(self, place: int) -> list[int]:
        """The numbers of tensors whose values the workers at a place have."""
        return [number for number, own in enumerate(self._places) if own == place]

    def stale_at(self, place: int) -> list[int]:
        """Those of them that the workers have changed since they were fetched."""
        return [number for number in self.at(place) if number in self.stale]

    def names(self, names: Mapping[int, str]) -> dict[int, str]:
        """The names of tensors by their numbers, out of those by their ids."""
        return {n: names[id(t)] for n, t in enumerate(self.tensors) if id(t) in names}

    def give_up(self, place: int, tensors: Iterable[torch.Tensor]) -> None:
        """Let workers elsewhere have tensors that those at this place have for optimizers alone.

        Those that they have changed since stay where they are.
        """
        for number in self.numbers(tensors):
            if self._places[number] == place and number not in self.stale:
                self._places[number] = None

    def deliveries(self, owned: Sequence[Iterable[torch.Tensor]]) -> list[Delivery]:
        """What the workers at every place need to know of tensors before they can use them.

        Args:
            owned: for every place the tensors whose values it is to have.
        """
        first = len(self.tensors)
        for tensor in [t for _, t in named_tensors(self._model)] + [
            t for own in owned for t in own
        ]:
            if not self.knows(tensor):
                self._numbers[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
                self._places.append(None)
                self._versions.append(_state(tensor))
                self._kinds.append((tensor.shape, tensor.dtype))
                self._hooks += hooks_of_tensors([tensor])
                self._requires_grad.append(tensor.requires_grad)
        new = range(first, len(self.tensors))
        found = []
        for place, own in enumerate(owned):
            numbers = [n for n in dict.fromkeys(self.numbers(own)) if self._places[n] is None]
            for number in numbers:
                self._places[number] = place
                self._versions[number] = _state(self.tensors[number])
            named = dict.fromkeys([*new, *numbers])
            values = {n: self.tensors[n].detach() for n in numbers}
            found.append(Delivery([self._described(n) for n in named], values))
        return found

    def _described(self, number: int) -> Shared:
        tensor = self.tensors[number]
        return described(number, tensor, place_of(tensor, 0))

    # -- what the script has done to them ---------------------------------------------------

    def check(self) -> None:
        """Raise if tensors are others than the workers can have.

        Raises:
            InputError: one was changed here while it was stale, or has another shape or dtype now,
                or other hooks.
        """
        if hooks_of_tensors(self.tensors) != self._hooks:
            raise InputError(
                "hooks of a parameter were registered or removed after the pipeline was built, "
                "which its worker does not see; register them before, or use "
                'workers="threads"'
            )
        changed = self._changed()
        for number in changed:
            tensor, (shape, dtype) = self.tensors[number], self._kinds[number]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise InputError(
                    f"a tensor of shape {tuple(shape)}, {dtype}, has another shape or dtype since "
                    f"the pipeline was built: {tuple(tensor.shape)}, {tensor.dtype}. Its worker "
                    "cannot follow that; build a new pipeline"
                )
        if lost := self._lost(changed):
            tensor = self.tensors[min(lost)]
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in the script's model, which "
                "had older values of it than the workers: some training was lost in that. Call "
                "pipe.fetch() before you change it; or load all of a state dict with "
                "pipe.load_state_dict. pipe.fetch() now undoes the change"
            )

    def keep_changes(self) -> list[torch.Tensor]:
        """Let the script have its own values of tensors, as the workers go.

        After it `check` finds nothing.

        Returns:
            the tensors that the workers had newer values of, which are lost.
        """
        self._hooks = hooks_of_tensors(self.tensors)
        changed = self._changed()
        lost = [self.tensors[n] for n in self._lost(changed)]
        for number in changed:
            tensor = self.tensors[number]
            if (tensor.shape, tensor.dtype) != self._kinds[number]:
                self._places[number] = None
        self.stale -= changed
        return lost

    def give_up_changes(self) -> None:
        """Let the next fetch undo what `check` would raise for: changes of older values."""
        for number in self._lost(self._changed()):
            tensor = self.tensors[number]
            if (tensor.shape, tensor.dtype) == self._kinds[number]:
                self._versions[number] = _state(tensor)

    def _lost(self, changed: set[int]) -> set[int]:
        """Those that the script has changed, although the workers had newer values.

        There are none if it has changed all of these, as by loading a state dict. That does not
        have buffers with `persistent=False`: they stay as the workers have them.
        """
        if not changed & self.stale:
            return set()
        missing = (
            id(module._buffers[name])
            for module in self._model.modules()
            for name in module._non_persistent_buffers_set
        )
        left_out = {self._numbers[key] for key in missing if key in self._numbers}
        return set() if self.stale - left_out <= changed else changed & self.stale

    def _changed(self) -> set[int]:
        """The numbers of tensors that are not what workers know of them."""
        return {
            number
            for number, tensor in enumerate(self.tensors)
            if self._places[number] is not None and _state(tensor) != self._versions[number]
        }

    def changes(self, places: int) -> list[TensorChanges]:
        """What has to be sent to the workers at every place.

        Raises:
            InputError: see `check`.
        """
        self.check()
        drafts = [self._again.setdefault(place, _Draft()) for place in range(places)]
        for number in sorted(self._changed()):  # whatever is noted is noted here first
            tensor = self.tensors[number]
            drafts[self._places[number] or 0].values[number] = tensor.detach()
            self._versions[number] = _state(tensor)
            self.stale.discard(number)
        for number, tensor in enumerate(self.tensors):
            place = self._places[number]
            if place is not None and isinstance(tensor, nn.Parameter):
                self._look_at(number, tensor, drafts[place])
        for draft in drafts:
            self._note(draft)
        for place, draft in enumerate(drafts):
            self._unsure.setdefault(place, _Draft()).update(draft)
        self._again = {}
        return [draft.changes() for draft in drafts]

    def _look_at(self, number: int, parameter: nn.Parameter, draft: _Draft) -> None:
        """Note what the script has done to a parameter's gradient, and to `requires_grad`."""
        if parameter.requires_grad != self._requires_grad[number]:
            draft.requires_grad[number] = parameter.requires_grad
            self._requires_grad[number] = parameter.requires_grad
        now, before = parameter.grad, self._stand_ins.get(number)
        if now is before:
            if before is not None and before.is_zeroed:
                draft.zeroed.add(number)
                before.is_zeroed = False
        elif now is None:
            draft.drop(number)
            del self._stand_ins[number]
        elif not isinstance(now, GradientElsewhere):
            draft.give(number, now.detach())
            self._stand_in(number, parameter)

    def _stand_in(self, number: int, parameter: nn.Parameter) -> None:
        parameter.grad = self._stand_ins[number] = GradientElsewhere(parameter)

    def confirm(self) -> None:
        """What was sent has arrived."""
        self._unsure.clear()

    def resend(self) -> None:
        """What was sent may be lost."""
        for place, draft in self._unsure.items():
            older = self._again.setdefault(place, _Draft())
            older.update(draft)
        self._unsure.clear()

    def _note(self, draft: _Draft) -> None:
        """Note what is sent to workers."""
        noted = self._noted
        if draft.values or draft.requires_grad:
            noted.is_simple = False
        for number, gradient in draft.gradients.items():
            if gradient is None:
                noted.dropped.append(self.tensors[number])
            else:
                noted.is_simple = False
        noted.zeroed += [self.tensors[number] for number in draft.zeroed]

    def take_noted(self) -> ScriptChanges:
        """Changes sent to workers that no copy or log protects yet; the caller protects them."""
        noted, self._noted = self._noted, ScriptChanges()
        return noted

    # -- what workers have done to them -----------------------------------------------------

    def have_gradients(self, place: int, present: Iterable[int]) -> None:
        """Let the parameters at a place have gradients that stand for those of the workers."""
        there = set(present)
        for number in self.at(place):
            parameter = self.tensors[number]
            if not isinstance(parameter, nn.Parameter):
                continue
            if number in there and number not in self._stand_ins:
                self._stand_in(number, parameter)
            elif number not in there and number in self._stand_ins:  # a hook has dropped it
                del self._stand_ins[number]
                parameter.grad = None

    def has_changed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that workers have changed these tensors: their values here are old until fetched."""
        self.stale.update(self.numbers(tensors))

    @torch.no_grad()
    def have(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values that workers have into the script's tensors, by number."""
        for number, value in values.items():
            self.tensors[number].copy_(value)
            self._versions[number] = _state(self.tensors[number])
            self.stale.discard(number)

    def have_real_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Have gradients that are real, as the workers go."""
        for number, gradient in gradients.items():
            if isinstance(self.tensors[number].grad, GradientElsewhere):
                self.tensors[number].grad = gradient
            self._stand_ins.pop(number, None)

    def go_back(
        self, values: Mapping[int, torch.Tensor], gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Take over the values and gradients of a copy of what the workers had.

        Args:
            values: of tensors in the copy, by number.
            gradients: of parameters in the copy, by number.
        """
        self.have({n: value for n, value in values.items() if self._places[n] is not None})
        self.stale.clear()
        self._stand_ins.clear()
        for number, tensor in enumerate(self.tensors):
            if self._places[number] is not None and isinstance(tensor, nn.Parameter):
                found = gradients.get(number)
                tensor.grad = None if found is None else found.clone()

    def current(self) -> list[torch.Tensor]:
        """The tensors of which the script has what the workers have."""
        return [
            tensor
            for number, tensor in enumerate(self.tensors)
            if self._places[number] is not None and number not in self.stale
        ]

    def with_gradients(self, place: int) -> list[int]:
        """The numbers of parameters at a place whose gradients are there."""
        return [number for number in self.at(place) if number in self._stand_ins]

    # -- reading it as a whole --------------------------------------------------------------

    def sending(self, send: Callable[[], Any]) -> Any:
        """Pickle modules for workers: nobody reads their tensors."""
        self._is_sending = True
        try:
            return send()
        finally:
            self._is_sending = False

    def check_read(self, module: nn.Module, is_part: bool = False) -> None:
        """Raise if a module's state is read while workers have newer values.

        After `close()` it is a warning.

        Args:
            module: whose state is read.
            is_part: whether it is read as a part of a larger module.

        Raises:
            InputError: workers have newer values.
        """
        if not self.stale or self._is_sending or module not in self._watched:
            return
        if self._is_closed and is_part:  # it was said of the whole
            return
        text = (
            "the workers in the Ray cluster have trained since the script's model was last "
            f"fetched, so its state_dict() would be an old one: {_AGAIN}"
        )
        if not self._is_closed:
            raise InputError(text)
        warnings.warn(f"{text}. The pipeline is closed: it had to be done before", stacklevel=3)

    def close(self) -> None:
        """The workers are gone; what was not fetched is lost."""
        self._is_closed = True
        for number, stand_in in self._stand_ins.items():
            if self.tensors[number].grad is stand_in:
                self.tensors[number].grad = None
        self._stand_ins.clear()
        if not self.stale:
            for handle in self._handles:
                handle.remove()


@dataclass
class ScriptChanges:
    """What the script has done to the tensors of its model.

    Attributes:
        dropped: parameters whose gradients it has dropped.
        zeroed: those whose gradients it has set to zero.
        is_simple: whether it has done nothing else.
    """

    dropped: list[torch.Tensor] = field(default_factory=list)
    zeroed: list[torch.Tensor] = field(default_factory=list)
    is_simple: bool = True

    def __bool__(self) -> bool:
        return bool(self.dropped or self.zeroed) or not self.is_simple

    def followed_by(self, work: Callable[[Any], object] | None) -> Callable[[Any], None]:
        """Does all of it again, and then some work."""

        def both(argument: Any) -> None:
            self.redo()
            if work is not None:
                work(argument)

        return both

    def redo(self) -> None:
        """Drop and zero the same gradients again; anything else that was done is not repeated."""
        for tensor in self.dropped:
            tensor.grad = None
        for tensor in self.zeroed:
            if tensor.grad is not None:
                tensor.grad.zero_()


class _Draft:
    """Changes of one place that are being gathered."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor | None] = {}
        self.zeroed: set[int] = set()
        self.requires_grad: dict[int, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.values or self.gradients or self.zeroed or self.requires_grad)

    def drop(self, number: int) -> None:
        """Note that the script has dropped a gradient."""
        self.give(number, None)

    def give(self, number: int, gradient: torch.Tensor | None) -> None:
        """The script has given a parameter this gradient."""
        self.gradients[number] = gradient
        self.zeroed.discard(number)

    def update(self, newer: _Draft) -> None:
        """Add what came later, which counts where both have something."""
        self.values |= newer.values
        for number, gradient in newer.gradients.items():
            self.give(number, gradient)
        self.zeroed |= newer.zeroed
        self.requires_grad |= newer.requires_grad

    def changes(self) -> TensorChanges:
        """All of it as one message; what is changed here afterwards is not in that."""
        return TensorChanges(
            dict(self.values), dict(self.gradients), sorted(self.zeroed), dict(self.requires_grad)
        )


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """A version and an address; one differs once the tensor is changed in place or has moved."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
