"""What the Python of open modules reads besides tensors, noted while it is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES
from penstock.capture.memory_layout import asked_of, layout
from penstock.capture.numbers import (
    Followed,
    Given,
    Number,
    Outcome,
    Where,
    followed,
    name_of,
    plain,
)
from penstock.capture.places import (
    MISSING,
    SCALARS,
    Item,
    Place,
    asks_itself,
    attributes_of,
    frozen,
    is_helper,
    items_of,
    look,
    noting,
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


@dataclass
class Reads:
    """What the Python of a recording has read, on which it depends that the forward is this one.

    Attributes:
        seen: what was in every place: plain data as it was, of anything else `MISSING`.
        readers: the open module that was the first to read it.
        grad: whether gradients were enabled, if that was asked.
        settings: what functions of torch said of the process, `torch.get_default_dtype()` say.
        requires_grad: of parameters and other tensors of the model, by name.
        layouts: how some of them lie in memory, by name.
        inputs: what was asked of them, by their number and what it was, see
            `penstock.capture.memory_layout.asked_of`.
        numbers: the places whose number is passed in.
        given: the leaves of the inputs that are numbers which are passed in.
        outcomes: comparisons of those with others.
        replaced: where closed modules put other tensors or modules themselves.
        aliases: for places of objects, another one where the same object was; what is read of it
            is noted there.
    """

    seen: dict[Place, Any] = field(default_factory=dict)
    readers: dict[Place, str] = field(default_factory=dict, compare=False)
    grad: bool | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    layouts: dict[str, Any] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Any] = field(default_factory=dict)
    numbers: tuple[Place, ...] = ()
    given: tuple[int, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    replaced: frozenset[Place] = frozenset()
    aliases: dict[Place, Place] = field(default_factory=dict)

    def with_all_of(self, other: Reads) -> Reads:
        """What two recordings have read that are generalised together."""
        return Reads(
            other.seen | self.seen,
            other.readers | self.readers,
            self.grad if self.grad is not None else other.grad,
            other.settings | self.settings,
            other.requires_grad | self.requires_grad,
            other.layouts | self.layouts,
            other.inputs | self.inputs,
            self.numbers,
            self.given,
            tuple(dict.fromkeys((*self.outcomes, *other.outcomes))),
            self.replaced | other.replaced,
            other.aliases | self.aliases,
        )

    def passed_in(self, model: nn.Module, leaves: Sequence[Any] = ()) -> dict[str, Any]:
        """The numbers as they are now, by the names under which they are passed.

        Args:
            model: where those in attributes are.
            leaves: of the inputs; none where only those in attributes are asked for.
        """
        found = {name_of(place): place.find(model) for place in self.numbers}
        if leaves:
            found |= {name_of(Given(k)): leaves[k] for k in self.given}
        return found

    def changed(self, model: nn.Module) -> Place | None:
        """A place where, after the forward, something else is than it has read."""
        for place, value in self.seen.items():
            if value is MISSING or place.last == "training" or place in self.numbers:
                continue
            if frozen(place.find(model)) != frozen(value):
                return place
        return None


class Reading:
    """Notes what is read while a forward runs.

    Args:
        model: whose forward.
        paths: the qualified names of its modules, by id.
        is_outside: whether the Python that runs now is an open module's own.
        reader: the open module whose Python runs now.
        numbers: the places whose numbers are followed, with what they are.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[int, str],
        is_outside: Callable[[], bool],
        reader: Callable[[], str],
        numbers: Mapping[Where, Any],
    ) -> None:
        places = tuple(place for place in numbers if isinstance(place, Place))
        given = tuple(place.leaf for place in numbers if isinstance(place, Given))
        self.reads = Reads(numbers=places, given=given)
        self._model = model
        self._is_outside = is_outside
        self._reader = reader
        self._roots = {key: Place(path, ()) for key, path in paths.items()}
        self._kept: list[Any] = []
        self._quiet = 1
        self._frozen: dict[Place, Any] = {}
        self._lenient: dict[Place, Any] = {}
        self._patched: dict[type, Any] = {}
        self._numbers = numbers

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While open, what is read is noted."""
        self._quiet -= 1
        try:
            yield
        finally:
            self._quiet += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, nothing is noted."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def followed(self) -> dict[Where, Any]:
        """The numbers that are followed, to be put in their places."""
        return {
            place: followed(value, Number("named", (name_of(place),)), self._note)
            for place, value in self._numbers.items()
        }

    def _note(self, outcome: Outcome) -> None:
        if not self._quiet and self._is_outside() and outcome not in self.reads.outcomes:
            self.reads.outcomes += (outcome,)

    # -- attributes -----------------------------------------------------------------------

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Note that Python has read an attribute of a module or a helper."""
        if self._quiet or (name.startswith("__") and name != "__dict__"):
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

    def _all_of(self, owner: Any, root: Place) -> None:
        """Note all attributes of an object: how many of them are read cannot be seen."""
        self._at(owner, Place(root.module, (*root.names, "__dict__")), MISSING)
        for key, held in list(attributes_of(owner).items()):
            if key not in _OWN:
                self._at(owner, Place(root.module, (*root.names, key)), held)

    def absent(self, module: nn.Module, name: str) -> None:
        """Note that Python has looked for an attribute that a module does not have."""
        self.attribute(module, name, MISSING)

    def _at(self, owner: Any, place: Place, value: Any) -> None:
        if place in self._frozen or isinstance(value, Followed):
            return
        if asks_itself(owner) and place.last != "__dict__":
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

    def _follow(self, value: Any, place: Place, depth: int = 4) -> None:
        """See to it that reads of a helper's own attributes are noted, too.

        So are those of helpers in containers, and of those whose methods are held.
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
            if not known and place.find(self._model) is value:  # no property, which is asked itself
                self.reads.aliases[place] = self._roots[id(value)]
        else:
            self._roots[id(value)] = place
            self._kept.append(value)
            if not self._patch(type(value)):
                self._all_of(value, place)

    def _patch(self, kind: type) -> bool:
        """Whether reads of the attributes of such objects are noted from here on."""
        if kind in self._patched:
            return True
        own = vars(kind).get("__getattribute__", MISSING)
        try:
            type.__setattr__(kind, "__getattribute__", noting(kind, self.attribute))
        except TypeError:
            return False
        self._patched[kind] = own
        return True

    def release(self) -> None:
        """Let the classes of helpers be as they were."""
        for kind, own in self._patched.items():
            if own is MISSING:
                type.__delattr__(kind, "__getattribute__")
            else:
                type.__setattr__(kind, "__getattribute__", own)
        self._patched.clear()

    # -- other things ---------------------------------------------------------------------

    def called(self, path: str, module: nn.Module) -> None:
        """Note that a closed module is called: which tensors and modules stand where in it."""
        if not self._is_outside():
            return
        for name, inner in module.named_modules(prefix=path):
            for registry in REGISTRIES:
                place = Place(name, (registry,))
                held = attributes_of(inner).get(registry)
                if place not in self._frozen and isinstance(held, dict):
                    self._lenient.setdefault(place, frozen(held))

    def asked_for_grad(self, value: bool) -> None:
        """Note that Python has asked whether gradients are enabled."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not self._quiet and self._is_outside() and not caller.startswith(_TORCH):
            self.reads.grad = value

    def asked_for(self, name: str, value: Any) -> None:
        """Note that Python has asked a function of torch, of this name, for a setting."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not self._quiet and self._is_outside() and not caller.startswith("torch."):
            self.reads.settings[name] = value

    def asked_for_layout(
        self, name: str, leaves: Iterable[Any], known: Callable[[Any], Any], inputs: Sequence[Any]
    ) -> None:
        """Note that Python has asked how tensors lie in memory.

        Args:
            name: of the function that says so.
            leaves: the tensors, among others.
            known: says which value one is.
            inputs: all of them.

        Raises:
            ValueError: strides are no matter of the shape.
        """
        if self._quiet or not self._is_outside():
            return
        for tensor in leaves:
            value = known(tensor) if isinstance(tensor, torch.Tensor) else None
            if value is not None and hasattr(value, "name"):
                self.reads.layouts[value.name] = layout(tensor)
            elif value is not None:
                own = value.call < 0
                asked = {value.leaf: tensor} if own else dict(enumerate(inputs))
                for k, given in asked.items():
                    if isinstance(given, torch.Tensor):
                        self.reads.inputs[k, "layout"] = layout(given)
                        if name == "stride" and layout(given)[0] == "apart":
                            raise ValueError("asks for the strides of a tensor with gaps")

    def asked_for_state(
        self, name: str, leaves: Iterable[Any], known: Callable[[Any], Any]
    ) -> None:
        """Note that Python has asked something else of inputs that no program knows."""
        if self._quiet or not self._is_outside():
            return
        for tensor in leaves:
            value = known(tensor) if isinstance(tensor, torch.Tensor) else None
            if value is not None and not hasattr(value, "name") and value.call < 0:
                self.reads.inputs[value.leaf, name] = asked_of(tensor, name)
            elif name == "is_inference":
                self.reads.settings["is_inference_mode_enabled"] = SETTINGS[
                    "is_inference_mode_enabled"
                ]()

    def asked_of(self, leaves: Iterable[Any], known: Callable[[Any], Any]) -> None:
        """Note that Python has asked whether tensors require gradients.

        Args:
            leaves: the tensors, among others.
            known: says which value one is.
        """
        if self._quiet or not self._is_outside():
            return
        for tensor in leaves:
            if not isinstance(tensor, torch.Tensor):
                continue
            value = known(tensor)
            if value is not None and hasattr(value, "name"):
                self.reads.requires_grad[value.name] = tensor.requires_grad
            elif value is not None and value.call < 0:
                self.reads.inputs[value.leaf, "requires_grad"] = tensor.requires_grad
            else:  # it is made of others
                with self.paused():
                    for name, parameter in self._model.named_parameters():
                        self.reads.requires_grad.setdefault(name, parameter.requires_grad)
                self.reads.grad = torch.is_grad_enabled()

    def changed(self) -> Place | None:
        """A place that the forward itself has changed since it was read; call it at the end.

        Registries of closed modules that it changes, for their own use, are left out from here on.
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


def _is_inherited(owner: Any, name: str, kept: Any) -> bool:
    """Whether this comes with torch's or Python's own classes: nobody changes it there."""
    if kept is MISSING or isinstance(owner, type) or name in attributes_of(owner):
        return False
    return static(nn.Module, name) is kept or static(object, name) is kept
