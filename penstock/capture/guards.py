"""Whether everything that a forward read when it was recorded is still as it was.

This is checked before every pass, so the objects to compare are gathered once in flat lists. Mostly
they are the very same objects as before. Where they are not, everything is compared by value.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType, MemberDescriptorType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES, find
from penstock.capture.calls import Reads
from penstock.capture.equality import same_constant
from penstock.capture.memory_layout import layout
from penstock.capture.numbers import Given, Numeric, come_out, name_of
from penstock.capture.places import (
    MISSING,
    Item,
    Place,
    attributes_of,
    frozen,
    look,
    overrides_lookup,
    parts_of,
    static,
)
from penstock.capture.reads import SETTINGS
from penstock.errors import InputError

_REQUIRES_GRAD, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
_TRAINING = attrgetter("training")
MOST_WAYS = 64
"""The most recordings of one mode and signature that are kept."""

_SIMPLE = (bool, int, float, str, type(None))


class Guards:
    """What one recording has read, and what was there.

    Args:
        model: whose forward was recorded, as it is now.
        reads: what was read.
    """

    def __init__(self, model: nn.Module, reads: Reads) -> None:
        self.reads = reads
        self._model = model
        self._places = [place for place in reads.seen if place not in reads.numbers]
        self._kinds = {place: type(place.find(model)) for place in reads.numbers}
        self._frozen = {
            place: frozen(place.find(model) if seen is MISSING else seen)
            for place, seen in reads.seen.items()
            if place not in reads.numbers
        }
        given = {name_of(Given(leaf)) for leaf in reads.given}  # which is looked at with the inputs
        self._outcomes = [o for o in reads.outcomes if given.isdisjoint(o[0].names())]
        self._fast: _Cells | None = None
        self._requires_grad = list(reads.requires_grad.values())
        self._tensors = [find(model, name) for name in reads.requires_grad]
        self._laid_out = [find(model, name) for name in reads.layouts]
        self._modules = list(model.modules())
        self._classes = list(map(type, self._modules))
        self._resting = [model.get_submodule(name) for name in reads.resting]
        self._parameters = list(model.parameters())
        self._dtypes = list(map(_DTYPE, self._parameters))

    def hold(self) -> bool:
        """Whether the model's Python would read the same now as when it was recorded.

        Raises:
            InputError: a tensor or a module has been replaced, and no plain data is different.
        """
        for place, marks in self.reads.marks.items():
            now = place.find(self._model)
            if not any(same_constant(now, mark) for mark in marks):
                return False
        different = self.different()
        if different is None:
            return True
        if isinstance(different, Place) and self.is_replaced(different):
            raise self._replaced(different)
        return False

    def apply_once(self) -> bool:
        """Set what a first forward would set, if this makes everything as it was read.

        Otherwise nothing is changed.

        Returns:
            whether something was set.
        """
        put = []
        for place, (before, after) in self.reads.set_once.items():
            now = place.find(self._model)
            if type(now) is type(before) and now == before:
                place.put(self._model, after)
                put.append((place, before))
        if put and self.different() is None:
            return True
        for place, before in put:
            place.put(self._model, before)
        return False

    def different(self) -> Place | str | None:
        """A place whose value is not the one that was read; `None` if there is none.

        What is no place is returned as text. Plain data comes before tensors and modules.
        """
        reads = self.reads
        if (around := self._different_around()) is not None:
            return around
        for place, kind in self._kinds.items():
            if type(place.find(self._model)) is not kind:
                return place
        if self._outcomes:
            passed = reads.passed_in(self._model)
            if not come_out(self._outcomes, passed):
                return next(iter(self._kinds))
        now = list(map(_REQUIRES_GRAD, self._tensors))
        if now != self._requires_grad:
            pairs = zip(reads.requires_grad, now, self._requires_grad, strict=True)
            return f"{next(name for name, one, other in pairs if one != other)}.requires_grad"
        if self._fast is not None:
            verdict = self._fast.verdict()
            if verdict is not None:
                return None if verdict is True else verdict
        places = [p for p in self._places if frozen(p.find(self._model)) != self._frozen[p]]
        for place, first in reads.aliases.items():
            if place.find(self._model) is not first.find(self._model):
                return f"{place}, which was the object at {first}"
        if not places:
            self._fast = _Cells(self._model, self._places, self._frozen)
            return None
        return min(places, key=self.is_replaced)

    def _different_around(self) -> str | None:
        """What is different in the process, in all parameters or in all modules, in words."""
        reads = self.reads
        if reads.grad not in (None, torch.is_grad_enabled()):
            return "whether gradients are enabled"
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            return "the dtype of parameters"
        if list(map(type, self._modules)) != self._classes:
            return "the class of a module"
        if any(map(_TRAINING, self._resting)):
            return "whether a module is in training mode"
        for name, value in reads.settings.items():
            if SETTINGS[name]() != value:
                return f"torch.{name}()"
        if list(map(layout, self._laid_out)) != list(reads.layouts.values()):
            return "how parameters lie in memory"
        return None

    def is_replaced(self, place: Place) -> bool:
        """Whether what is different there is a tensor or a module."""
        if place not in self._frozen:
            return False
        now = frozen(place.find(self._model))
        return set(parts_of(now)) != set(parts_of(self._frozen[place]))

    def check_replaced(self) -> None:
        """Raise if a tensor or a module has been replaced, whatever else is different.

        Raises:
            InputError: a tensor or a module has been replaced.
        """
        for place in self._places:
            if frozen(place.find(self._model)) != self._frozen[place] and self.is_replaced(place):
                raise self._replaced(place)

    def _replaced(self, place: Place) -> InputError:
        value = place.find(self._model)
        now = MISSING if value is MISSING else frozen(value)
        name = _name_in(place, now, self._frozen[place])
        return InputError(
            f"{name!r} was replaced, added or removed after the pipeline was built; the stages "
            "still have the earlier tensor or module. Copy values into it instead "
            "(parameter.data.copy_(...), or load_state_dict without assign=True), or build a new "
            "pipeline"
        )

    def rebind(self) -> None:
        """Accept the tensors and modules that the model has now as those that were recorded."""
        for place in self._places:
            if self.is_replaced(place):
                self._frozen[place] = frozen(place.find(self._model))
        self._tensors = [find(self._model, name) for name in self.reads.requires_grad]
        self._laid_out = [find(self._model, name) for name in self.reads.layouts]
        self._fast = None

    def leave_out(self, places: frozenset[Place]) -> None:
        """Do not look at these places: forwards themselves change what is there."""
        if not places.isdisjoint(self._frozen):
            self._places = [place for place in self._places if place not in places]
            self._frozen = {p: value for p, value in self._frozen.items() if p not in places}
            self._fast = None

    def other_numbers(self) -> dict[Place, Numeric]:
        """The places whose number has changed but not its type, with the number that was read."""
        found = {}
        for place, seen in self.reads.seen.items():
            if type(seen) in (int, float) and place not in self.reads.numbers:
                now = place.find(self._model)
                if type(now) is type(seen) and frozen(now) != frozen(seen):
                    found[place] = seen
        return found


class _Cells:
    """Where to look, in flat lists: dictionaries and keys, objects and names, containers."""

    def __init__(
        self, model: nn.Module, places: Iterable[Place], wanted: Mapping[Place, Any]
    ) -> None:
        self._found: dict[tuple[int, str], tuple[Any, str]] = {}
        self._places: list[Place] = []
        self._static: dict[tuple[type, str], tuple[Any, str]] = {}
        self._looked_up: dict[tuple[int, str], tuple[Any, str]] = {}
        self._lists: dict[int, Any] = {}
        self._mappings: dict[int, Any] = {}
        self._arrays: list[tuple[Any, bytes]] = []
        registries: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for place in places:
            owner = place.owner(model)
            if _is_registry(owner, place.last):
                own = attributes_of(owner)
                registries[id(own), place.last] = own, place.last
            else:
                self._add(owner, place)
        self._registered = _Registered(registries.values())
        self._keys = [name for _, name in self._found.values()]
        self._dicts = [held for held, _ in self._found.values()]
        self._names = [name for _, name in self._static.values()]
        self._classes = [held for held, _ in self._static.values()]
        self._looked_up_names = [name for _, name in self._looked_up.values()]
        self._objects = [held for held, _ in self._looked_up.values()]
        self._sequences = list(self._lists.values())
        self._tables = list(self._mappings.values())
        self._expected = self._now()

    def _add(self, owner: object, place: Place) -> None:
        name, value = place.last, look(owner, place.last)
        if isinstance(name, Item):  # the container is looked at
            return
        if name == "__dict__":
            self._lists[id(attributes_of(owner))] = attributes_of(owner)
            return
        if overrides_lookup(owner) or _has_slot(owner, name):
            self._looked_up[id(owner), name] = owner, name
        elif isinstance(owner, type):
            self._add_class(owner, name)
        else:
            own = attributes_of(owner)
            if (id(own), name) not in self._found:
                self._found[id(own), name] = own, name
                self._places.append(place)
            if name not in own and isinstance(owner, nn.Module):
                for registry in REGISTRIES:
                    held = own.get(registry)
                    if isinstance(held, dict) and (name in held or value is MISSING):
                        for where, key in ((own, registry), (held, name)):
                            if (id(where), key) not in self._found:
                                self._found[id(where), key] = where, key
                                self._places.append(place)
            if name not in own and (value is not MISSING):
                self._add_class(type(owner), name)
        self._add_contents(value)

    def _add_class(self, kind: type, name: str) -> None:
        if static(kind, name) is MISSING:
            return
        for owner in type.mro(kind):
            self._static[owner, name] = vars(owner), name
            if name in vars(owner):
                return

    def _add_contents(self, value: object) -> None:
        if isinstance(value, dict):
            if id(value) not in self._mappings:
                self._mappings[id(value)] = value
                if type(value) is not dict:
                    self._add_contents(attributes_of(value))
                for item in dict.values(value):
                    self._add_contents(item)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if id(value) not in self._lists:
                self._lists[id(value)] = value
                for item in value:
                    self._add_contents(item)
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.tobytes()))

    def _now(self) -> list[Any]:
        missing = repeat(MISSING)
        return [
            *map(dict.get, self._dicts, self._keys, missing),
            *map(MappingProxyType.get, self._classes, self._names, missing),
            *map(getattr, self._objects, self._looked_up_names, missing),
            *chain.from_iterable(self._sequences),
            *chain.from_iterable(self._tables),
            *chain.from_iterable(map(dict.values, self._tables)),
        ]

    def verdict(self) -> Place | Literal[True] | None:
        """`True` if nothing has changed, or the first place whose plain data has.

        `None` if something else has, so that everything has to be compared by value.
        """
        if not self._registered.is_same():
            return None
        now = self._now()
        if len(now) != len(self._expected):
            return None
        if all(map(is_, now, self._expected)):
            return True if self._same_arrays() else None
        for k, (new, old) in enumerate(zip(now, self._expected, strict=True)):
            if new is old:
                continue
            if type(new) not in _SIMPLE or type(old) not in _SIMPLE:
                return None
            if frozen(new) != frozen(old):
                return self._places[k] if k < len(self._places) else None
            self._expected[k] = new
        return True if self._same_arrays() else None

    def _same_arrays(self) -> bool:
        return all(array.tobytes() == content for array, content in self._arrays)


class _Registered:
    """The tensors and modules that modules have registered, in order.

    Only the dictionaries' values are compared, as their keys do not change without them; a
    dictionary may be replaced by another with the same values. Most are empty, which is quickest
    to check.

    Args:
        registries: for every registry the `__dict__` of its module, and its name there.
    """

    def __init__(self, registries: Iterable[tuple[dict[str, Any], str]]) -> None:
        empty: dict[str, list[dict[str, Any]]] = {}
        filled: dict[str, list[dict[str, Any]]] = {}
        for own, name in registries:
            (filled if own[name] else empty).setdefault(name, []).append(own)
        self._empty = [(itemgetter(name), modules) for name, modules in empty.items()]
        self._filled = [(itemgetter(name), modules) for name, modules in filled.items()]
        self._expected = list(self._now())

    def _now(self) -> Iterator[Any]:
        filled = chain.from_iterable(map(get, modules) for get, modules in self._filled)
        return chain(chain.from_iterable(map(dict.values, filled)), (MISSING,))

    def is_same(self) -> bool:
        """Whether the very same tensors and modules are there."""
        try:
            if any(any(map(get, modules)) for get, modules in self._empty):
                return False
            return all(map(is_, self._now(), self._expected))
        except (KeyError, TypeError):  # one has gone, or is no dictionary any more
            return False


def _is_registry(owner: object, name: str) -> bool:
    """Whether this attribute is a dictionary in which a module keeps what it has registered."""
    if name not in REGISTRIES or not isinstance(owner, nn.Module):
        return False
    held = attributes_of(owner).get(name)
    return isinstance(held, dict) and look(owner, name) is held


def _has_slot(owner: object, name: str) -> bool:
    """Whether an object keeps this attribute in a slot, or as objects of built-in types do."""
    return isinstance(static(type(owner), name), MemberDescriptorType)


def _name_in(place: Place, now: Any, before: Any) -> str:
    """The name of the tensor or module at which two frozen values differ first."""
    names = [name for name in place.names if name not in REGISTRIES]
    if place.last in REGISTRIES and now is not MISSING and issubclass(now[0], dict):
        (_, keys, values, *_), (_, old_keys, old_values, *_) = now, before
        current, old = (
            dict(zip(keys, values, strict=True)),
            dict(zip(old_keys, old_values, strict=True)),
        )
        differ = (key for key in {**old, **current} if current.get(key) != old.get(key))
        names += [str(key) for _, key in differ][:1]
    return ".".join((place.module, *names)).lstrip(".")


def check_stable(new: Guards, all_of_them: Sequence[Guards]) -> None:
    """Raise if the latest recording does not hold any more, or if there are too many of them.

    Args:
        new: the guards of the latest recording.
        all_of_them: the guards of all recordings of the same mode and signature.

    Raises:
        InputError: what the latest recording has read has changed again, or there are more than
            `MOST_WAYS` recordings.
    """
    different = new.different()
    if different is not None:
        raise InputError(
            f"the forward reads {different}, whose value changed during the recording, so the "
            "forward cannot be predicted"
        )
    if len(all_of_them) > MOST_WAYS:
        often = Counter(str(g.different()) for g in all_of_them[:-1]).most_common(1)[0][0]
        raise InputError(
            f"the forward reads {often}, which has changed {MOST_WAYS} times, and each time the "
            "forward was recorded again. A number that changes may be used in arithmetic and "
            "comparisons, and is then passed in; otherwise keep it in a buffer that is changed in "
            "place, or keep the module that reads it closed, with keep_closed="
        )
