"""What a worker's process knows of the model, and what the script has changed since.

Attributes of modules that have changed are sent before a pass. Tensors or hooks that were replaced
cannot be sent, and are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from penstock.capture.places import INTERNAL, MISSING, attributes_of, frozen, is_helper
from penstock.capture.trees import cloned, map_leaves, tree_leaves
from penstock.engine.hooks import hooks_of
from penstock.errors import InputError

_VERSION = attrgetter("_version")

AttributeChanges = Mapping[int, Mapping[str, Any]]
"""By the number of a module, its changed attributes with their values; `MISSING` if removed."""

_Changes = dict[int, dict[str, Any]]


class Unchanged:
    """Some modules of a model, of which a process has copies.

    They are looked at before every pass, so what is compared is gathered once, in flat lists.

    Args:
        model: the whole model, for the names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registries: list[dict[str, Any]] = []  # where each of these tensors is,
        self._names: list[str] = []  # by its name there
        self._tensors: list[Any] = []
        self._vars: list[dict[str, Any]] = []
        self._hooks: list[int] = []  # of them all

    def add(self, modules: Iterable[nn.Module], is_shared: Callable[[Any], bool]) -> None:
        """Watch these modules too, and those of their tensors that the process shares."""
        for module in modules:
            self._vars.append(vars(module))
            self._hooks += hooks_of([vars(module)])
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if is_shared(tensor):
                        self._registries.append(registry)
                        self._names.append(name)
                        self._tensors.append(tensor)

    def check(self) -> None:
        """Raise if a tensor was replaced, or if hooks were registered or removed.

        Raises:
            InputError: something was, which the process does not have.
        """
        now = list(map(dict.get, self._registries, self._names))
        if not all(map(is_, now, self._tensors)):
            pairs = zip(now, self._tensors, strict=True)
            name = self._name_of(next(k for k, (new, old) in enumerate(pairs) if new is not old))
            raise InputError(
                f"{name!r} was replaced after the pipeline was built, but its worker process has "
                "the old tensor. Copy values into it instead "
                "(load_state_dict without assign=True), or build a new pipeline"
            )
        if hooks_of(self._vars) != self._hooks:
            raise InputError(
                "hooks of a module were registered or removed after the pipeline was built, which "
                'its worker process does not see; register them before, or use workers="threads"'
            )

    def _name_of(self, number: int) -> str:
        registry = self._registries[number]
        owners = (
            path
            for path, module in self._model.named_modules()
            if registry is module._parameters or registry is module._buffers
        )
        owner = next(owners, "(of a module that was removed)")
        return f"{owner}.{self._names[number]}".lstrip(".")


class Following:
    """What a process knows of the plain attributes of its modules.

    They are looked at before every pass, so what is compared is gathered once, in flat lists.

    Args:
        shares: whether a tensor is one that the process shares. Whatever is written to such a
            tensor is there already, also where an attribute refers to it, as an LSTM's do.
    """

    def __init__(self, shares: Callable[[torch.Tensor], bool]) -> None:
        self._shares = shares
        self._vars: list[dict[str, Any]] = []
        self._known: list[dict[str, Any]] = []
        self._unsure: _Changes = {}  # sent, but perhaps lost
        self._again: _Changes = {}  # lost, perhaps, and not yet sent again
        self._expected: list[Any] = []  # what is compared before every pass
        self._gather()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Note that the process gets these modules, too, as they are now."""
        for module in modules:
            self._vars.append(attributes_of(module))
            self._known.append(self._own(self._vars[-1]))
        self._gather()
        self._expected = []  # look at all: others may have changed since the last pass

    def _gather(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._sequences: dict[int, Any] = {}
        self._tables: dict[int, dict[Any, Any]] = {}
        self._tensors: list[torch.Tensor] = []
        for own in self._vars:
            for name, value in own.items():
                if name not in INTERNAL:
                    self._dicts.append(own)
                    self._keys.append(name)
                    self._look_into(value)
        self._versions = list(map(_VERSION, self._tensors))
        self._expected = self._now()

    def _look_into(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not value.is_inference() and not self._shares(value):
                self._tensors.append(value)
            return
        table = attributes_of(value) if is_helper(value) else value
        if isinstance(table, dict) and id(table) not in self._tables:
            self._tables[id(table)] = table
            for item in dict.values(table):
                self._look_into(item)
        elif isinstance(table, (list, tuple, set)) and id(table) not in self._sequences:
            self._sequences[id(table)] = table
            for item in table:
                self._look_into(item)

    def _now(self) -> list[Any]:
        tables = self._tables.values()
        return [
            *map(len, self._vars),
            *map(dict.get, self._dicts, self._keys, repeat(MISSING)),
            *chain.from_iterable(self._sequences.values()),
            *chain.from_iterable(tables),
            *chain.from_iterable(map(dict.values, tables)),
        ]

    def has_changes(self) -> bool:
        """Whether something may have to be sent to the process before the next pass."""
        now = self._now()
        same = len(now) == len(self._expected) and all(map(is_, now, self._expected))
        versions = list(map(_VERSION, self._tensors))
        return not same or bool(self._again) or self._versions != versions

    def changes(self) -> AttributeChanges:
        """What has to be sent to the process before the next pass.

        Raises:
            InputError: it cannot be sent: an attribute has other parameters in it than before.
        """
        if not self.has_changes():
            return {}
        changes = {number: dict(names) for number, names in self._again.items()}
        every = list(map(self._own, self._vars))
        for number, (own, known, found) in enumerate(
            zip(self._vars, self._known, every, strict=True)
        ):
            names = (name for name in {**known, **found} if known.get(name) != found.get(name))
            for name in names:
                self._check(name, own.get(name))
                changes.setdefault(number, {})[name] = own.get(name, MISSING)
        self._known, self._again = every, {}  # only now, as it cannot fail any more
        self._gather()
        self._unsure = _merged(self._unsure, changes)
        return changes

    def _check(self, name: str, value: Any) -> None:
        leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        if any(map(self._shares, leaves)):
            raise InputError(
                f"the attribute {name!r} of a module has changed since the pipeline was built, and "
                "holds parameters or buffers of the model, which its worker process would get "
                "copies of. Build a new pipeline after such a change"
            )

    def _own(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of a module that the process should know, in a form for comparison."""
        own = ((name, value) for name, value in attributes.items() if name not in INTERNAL)
        return {name: self._contents(value) for name, value in own}

    def _contents(self, value: Any, depth: int = 6) -> Any:
        if isinstance(value, torch.Tensor):
            known = value.is_inference() or self._shares(value)
            return frozen(value), 0 if known else value._version
        if is_helper(value) and depth:
            return type(value), self._contents(attributes_of(value), depth - 1)
        if isinstance(value, dict) and depth:
            items = dict.items(value)
            return type(value), tuple((frozen(k), self._contents(v, depth - 1)) for k, v in items)
        if isinstance(value, (list, tuple)) and depth:
            return type(value), tuple(self._contents(item, depth - 1) for item in value)
        return frozen(value)

    def confirm(self) -> None:
        """Note that what was sent has arrived."""
        self._unsure = {}

    def resend(self) -> None:
        """Send again what may be lost, with the next changes."""
        self._again, self._unsure = _merged(self._again, self._unsure), {}


def _merged(older: _Changes, newer: _Changes) -> _Changes:
    """Changes of both, by module and attribute; where both have one, the newer value."""
    return {n: {**older.get(n, {}), **newer.get(n, {})} for n in {**older, **newer}}


def follow(modules: list[nn.Module], changes: AttributeChanges) -> None:
    """Let the copies of modules have these attributes."""
    for number, attributes in changes.items():
        own = attributes_of(modules[number])
        for name, value in attributes.items():
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = map_leaves(cloned, value)  # the memory of what was sent is only lent
