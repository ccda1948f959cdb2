"""Attributes of modules of which a worker process has copies: they follow what changes here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from penstock.capture.places import INTERNAL, MISSING, attributes_of, frozen, is_helper
from penstock.capture.trees import flatten, map_leaves
from penstock.errors import InputError

_VERSION = attrgetter("_version")

News = Mapping[int, Mapping[str, Any]]
"""For modules, by their number, the attributes that are others now; `MISSING` for those gone."""


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
        self._unsure: dict[int, dict[str, Any]] = {}  # sent, but perhaps lost
        self._again: dict[int, dict[str, Any]] = {}
        self._gather()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """The process gets these modules, too, as they are now."""
        for module in modules:
            self._vars.append(attributes_of(module))
            self._known.append(self._own(self._vars[-1]))
        self._gather()

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

    def news(self) -> News:
        """What the process has to be told before the next pass.

        Raises:
            InputError: it cannot be told: an attribute has other parameters in it than before.
        """
        now = self._now()
        same = len(now) == len(self._expected) and all(map(is_, now, self._expected))
        if same and not self._again and self._versions == list(map(_VERSION, self._tensors)):
            return {}
        news, self._again = self._again, {}
        for number, (own, known) in enumerate(zip(self._vars, self._known, strict=True)):
            found = self._own(own)
            names = (name for name in {**known, **found} if known.get(name) != found.get(name))
            for name in names:
                self._check(name, own.get(name))
                news.setdefault(number, {})[name] = own.get(name, MISSING)
            self._known[number] = found
        self._gather()
        self._unsure = {**self._unsure, **news}
        return news

    def _check(self, name: str, value: Any) -> None:
        leaves = (leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor))
        if any(map(self._shares, leaves)):
            raise InputError(
                f"the attribute {name!r} of a module has changed since the pipeline was built, and "
                "holds parameters or buffers of the model, which its worker process would get "
                "copies of. Build a new pipeline after such a change"
            )

    def _own(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """What a process should know of them, in a form that can be compared."""
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
        """What was told has arrived."""
        self._unsure = {}

    def doubt(self) -> None:
        """What was told may be lost."""
        self._again, self._unsure = self._unsure, {}


def follow(modules: list[nn.Module], news: News) -> None:
    """Let the copies of modules have these attributes."""
    for number, attributes in news.items():
        own = attributes_of(modules[number])
        for name, value in attributes.items():
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = map_leaves(_owned, value)


def _owned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value  # its memory is only lent
