"""What the Python of open modules reads besides tensors, noted while it is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES
from penstock.capture.calls import INPUTS, Attribute, Reads, Ref, Value
from penstock.capture.code import may_draw
from penstock.capture.memory_layout import layout
from penstock.capture.numbers import (
    Followed,
    Given,
    Number,
    Numeric,
    Outcome,
    Where,
    followed,
    name_of,
    plain,
)
from penstock.capture.places import (
    INTERNAL,
    MISSING,
    SCALARS,
    Item,
    Place,
    attributes_of,
    frozen,
    is_helper,
    items_of,
    look,
    noting,
    overrides_lookup,
    static,
)

_OWN = frozenset({*vars(nn.Module), *vars(nn.Module())}) - {
    "forward",
    "training",
    "__dict__",
    *REGISTRIES,
}
_TORCH = ("torch.autograd", "torch.utils", "torch.overrides", "penstock.")
_SCALARS = (*SCALARS, float, Enum)

SETTINGS: dict[str, Callable[[], Any]] = {
    name: getattr(torch, name)
    for name in (
        *("is_inference_mode_enabled", "get_default_dtype", "get_default_device"),
        *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
        *("is_deterministic_algorithms_warn_only_enabled", "is_anomaly_enabled"),
    )
}
"""Functions of torch that say how it is set, by name."""


class _Paused:
    """A pause of a `NotedReads`; most attributes that are read need one, so it is no generator."""

    __slots__ = ("_reading",)

    def __init__(self, reading: NotedReads) -> None:
        self._reading = reading

    def __enter__(self) -> None:
        self._reading.quiet += 1

    def __exit__(self, *raised: object) -> None:
        self._reading.quiet -= 1


class NotedReads:
    """Notes what is read while a forward runs.

    Args:
        model: the model whose forward runs.
        paths: the qualified names of its modules, by id.
        is_outside: whether the Python that runs now is an open module's own.
        reader: gives the qualified name of the open module whose Python runs now.
        known: gives the recorded value that a tensor is; `None` if it is none.
        numbers: the places whose numbers are followed, with these numbers.

    Attributes:
        reads: what was read so far.
        quiet: a count of reasons to note nothing; reads are noted while it is 0.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[int, str],
        is_outside: Callable[[], bool],
        reader: Callable[[], str],
        known: Callable[[torch.Tensor], Value | None],
        numbers: Mapping[Where, Numeric],
    ) -> None:
        places = tuple(place for place in numbers if isinstance(place, Place))
        given = tuple(place.leaf for place in numbers if isinstance(place, Given))
        self.reads = Reads(numbers=places, given=given)
        self._model = model
        self._is_outside = is_outside
        self._reader = reader
        self._known = known
        self._roots = {key: Place(path, ()) for key, path in paths.items()}
        self.quiet = 1
        self._kept: list[Any] = []
        self._frozen: dict[Place, Any] = {}
        self._lenient: dict[Place, Any] = {}
        self._patched: dict[type, Any] = {}
        self._numbers = numbers

    @contextmanager
    def active(self) -> Iterator[None]:
        """While open, what open modules read is noted in `reads`."""
        self.quiet -= 1
        try:
            yield
        finally:
            self.quiet += 1

    def paused(self) -> _Paused:
        """While open, nothing is noted: Penstock itself reads."""
        return _Paused(self)

    def followed(self) -> dict[Where, Numeric]:
        """The numbers that are followed, to be put in their places."""
        return {
            place: followed(value, Number("named", (name_of(place),)), self._note_comparison)
            for place, value in self._numbers.items()
        }

    def _note_comparison(self, outcome: Outcome) -> None:
        if not self.quiet and self._is_outside() and outcome not in self.reads.outcomes:
            self.reads.outcomes += (outcome,)

    # -- attributes -----------------------------------------------------------------------

    def note_attribute(self, owner: object, name: str, value: object) -> None:
        """Note that Python has read an attribute of a module or a helper."""
        if self.quiet or (name.startswith("__") and name != "__dict__"):
            return
        root = self._roots.get(id(owner))
        if root is None or not self._is_outside():
            return
        if name in _OWN and issubclass(type(owner), nn.Module):  # isinstance would ask the owner
            return
        with self.paused():
            if name == "__dict__":
                self._all_of(owner, root)
            else:
                self._at(owner, Place(root.module, (*root.names, name)), value)

    def _all_of(self, owner: object, root: Place) -> None:
        """Note all attributes of an object: which of them are read cannot be seen."""
        self._at(owner, Place(root.module, (*root.names, "__dict__")), MISSING)
        for key, held in list(attributes_of(owner).items()):
            if key not in _OWN:
                self._at(owner, Place(root.module, (*root.names, key)), held)

    def note_missing(self, module: nn.Module, name: str) -> None:
        """Note that Python has looked for an attribute that a module does not have."""
        self.note_attribute(module, name, MISSING)

    def _at(self, owner: object, place: Place, value: object) -> None:
        if place in self._frozen or isinstance(value, Followed):
            return
        if overrides_lookup(owner) and place.last != "__dict__":
            if callable(value) and not isinstance(value, type):
                return
            kept = value
        else:
            kept = look(owner, place.last)
            if _is_inherited(owner, place.last, kept):
                return
        self._frozen[place] = frozen(kept)
        self.reads.seen[place] = kept if isinstance(kept, _SCALARS) else MISSING
        self.reads.readers[place] = self._reader()
        self._follow(value, place)

    def _follow(self, value: object, place: Place, depth: int = 4) -> None:
        """See to it that reads of attributes of what was read are noted, too.

        Args:
            value: what was read: a helper, an object whose method is held, a container of such
                objects, or a class, of which plain data is noted at once.
            place: where it was read.
            depth: how many levels of containers to look into.
        """
        if isinstance(value, type):
            if (value.__module__ or "").partition(".")[0] not in ("torch", "builtins", "numpy"):
                for name, held in list(vars(value).items()):
                    if isinstance(held, _SCALARS) and not name.startswith("__"):
                        self._roots.setdefault(id(value), place)
                        self._at(value, Place(place.module, (*place.names, name)), held)
        elif isinstance(value, MethodType):
            self._follow(value.__self__, Place(place.module, (*place.names, "__self__")))
        elif not is_helper(value):
            if depth:
                held = ((k, v) for k, v in items_of(value) if not isinstance(v, type))
                for key, item in held:
                    inner = Place(place.module, (*place.names, Item(key)))
                    self._follow(item, inner, depth - 1)
        elif id(value) in self._roots:
            known = place in (self._roots[id(value)], *self.reads.aliases)
            if not known and place.find(self._model) is value:  # no property, which is computed
                self.reads.aliases[place] = self._roots[id(value)]
        else:
            self._roots[id(value)] = place
            self._kept.append(value)
            if not self._patch(type(value)):
                self._all_of(value, place)

    def _patch(self, kind: type) -> bool:
        """Have reads of attributes of such objects noted; returns whether that is possible."""
        if kind in self._patched:
            return True
        own = vars(kind).get("__getattribute__", MISSING)
        try:
            type.__setattr__(kind, "__getattribute__", noting(kind, self.note_attribute))
        except TypeError:
            return False
        self._patched[kind] = own
        return True

    def release(self) -> None:
        """Take what notes reads out of the classes of helpers."""
        for kind, own in self._patched.items():
            if own is MISSING:
                type.__delattr__(kind, "__getattribute__")
            else:
                type.__setattr__(kind, "__getattribute__", own)
        self._patched.clear()

    # -- other things ---------------------------------------------------------------------

    def note_call(self, path: str, module: nn.Module) -> None:
        """Note which tensors and modules a closed module that is called holds at which places."""
        if not self._is_outside():
            return
        for name, inner in module.named_modules(prefix=path):
            for registry in REGISTRIES:
                place = Place(name, (registry,))
                held = attributes_of(inner).get(registry)
                if place not in self._frozen and isinstance(held, dict):
                    self._lenient.setdefault(place, frozen(held))

    def note_switches(self, path: str, module: nn.Module) -> None:
        """Note the switches in a closed module that has drawn nothing, though its code may draw.

        They are attributes that are booleans, `None`, 0 or 1. If a probability is not 0 any more,
        for instance, the module's calls have to be seeded.
        """
        for name, inner in module.named_modules(prefix=path):
            kind: type = type(inner)
            if not may_draw(kind, inner.training):
                continue
            for key, held in attributes_of(inner).items():
                if key in INTERNAL:
                    continue
                if is_helper(held):
                    for inside, value in attributes_of(held).items():
                        self._note_switch(Place(name, (key, inside)), value)
                self._note_switch(Place(name, (key,)), held)

    def _note_switch(self, place: Place, held: object) -> None:
        if isinstance(held, (bool, type(None))) or (type(held) in (int, float) and held in (0, 1)):
            self._lenient.setdefault(place, frozen(held))

    def note_grad_mode(self, value: bool) -> None:
        """Note that Python has read whether gradients are enabled."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not self.quiet and self._is_outside() and not caller.startswith(_TORCH):
            self.reads.grad = value

    def note_setting(self, name: str, value: object) -> None:
        """Note that Python has called a function of torch, of this name, for a setting."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not self.quiet and self._is_outside() and not caller.startswith("torch."):
            self.reads.settings[name] = value

    def note_layout(self, name: str, leaves: Iterable[Any], inputs: Sequence[Any]) -> None:
        """Note that Python has read how tensors lie in memory.

        Args:
            name: the name of the function that Python has called.
            leaves: the leaves of its arguments.
            inputs: the leaves of the forward's inputs; the layouts of all of them are noted if a
                tensor is computed from them.

        Raises:
            ValueError: Python reads the strides of a tensor with gaps, which its shape does not
                tell.
        """
        if self.quiet or not self._is_outside():
            return
        for tensor in leaves:
            value = self._known(tensor) if isinstance(tensor, torch.Tensor) else None
            if isinstance(value, Attribute):
                self.reads.layouts[value.name] = layout(tensor)
            elif value is not None:
                own = value.call == INPUTS
                read = {value.leaf: tensor} if own else dict(enumerate(inputs))
                for k, given in read.items():
                    if isinstance(given, torch.Tensor):
                        self.reads.inputs[k, "layout"] = layout(given)
                        if name == "stride" and layout(given)[0] == "apart":
                            raise ValueError("asks for the strides of a tensor with gaps")

    def note_state(self, name: str, leaves: Iterable[Any]) -> None:
        """Note that Python has read a property of inputs that no program knows, as `is_pinned`.

        Args:
            name: the name of the function that Python has called.
            leaves: the leaves of its arguments.
        """
        if self.quiet or not self._is_outside():
            return
        for tensor in leaves:
            value = self._known(tensor) if isinstance(tensor, torch.Tensor) else None
            if isinstance(value, Ref) and value.call == INPUTS:
                self.reads.inputs[value.leaf, name] = input_property(tensor, name)
            elif name == "is_inference":
                self.reads.settings["is_inference_mode_enabled"] = SETTINGS[
                    "is_inference_mode_enabled"
                ]()

    def note_requires_grad(self, leaves: Iterable[Any]) -> None:
        """Note that Python has read whether tensors require gradients.

        Args:
            leaves: the tensors, among others.
        """
        if self.quiet or not self._is_outside():
            return
        for tensor in leaves:
            if not isinstance(tensor, torch.Tensor):
                continue
            value = self._known(tensor)
            if isinstance(value, Attribute):
                self.reads.requires_grad[value.name] = tensor.requires_grad
            elif value is not None and value.call == INPUTS:
                self.reads.inputs[value.leaf, "requires_grad"] = tensor.requires_grad
            else:  # it is made of others
                with self.paused():
                    for name, parameter in self._model.named_parameters():
                        self.reads.requires_grad.setdefault(name, parameter.requires_grad)
                self.reads.grad = torch.is_grad_enabled()

    def changed(self) -> Place | None:
        """Return a place that the forward itself has changed since it was read; call it at the end.

        What closed modules hold (`note_call`, `note_switches`) now counts as read if the forward
        has left it as it was; otherwise it is left out from here on.
        """
        with self.paused():
            for place, before in self._lenient.items():
                if frozen(place.find(self._model)) == before:
                    self.reads.seen[place] = MISSING
                    self.reads.readers[place] = place.module
                else:
                    self.reads.replaced |= {place}
            for place, before in self._frozen.items():
                if frozen(plain(place.find(self._model))) != before:
                    return place
        return None


def input_property(value: Any, name: str) -> Any:
    """What Python reads of an input: its `"layout"`, or the property of a tensor of this name.

    Of a number it is the `"value"`.
    """
    if name == "layout":
        return layout(value)
    if name == "value":
        return frozen(value)
    found = getattr(value, name)
    return found() if callable(found) else found


def _is_inherited(owner: object, name: str, kept: object) -> bool:
    """Whether an attribute comes from `nn.Module` or `object`, where nobody changes it."""
    if kept is MISSING or isinstance(owner, type) or name in attributes_of(owner):
        return False
    return static(nn.Module, name) is kept or static(object, name) is kept
