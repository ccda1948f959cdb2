"""Attributes of modules of which a worker process has copies: they follow what changes here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from penstock.capture.places import INTERNAL, MISSING, attributes_of, frozen, is_helper
from penstock.capture.trees import map_leaves

_VERSION = attrgetter("_version")

News = Mapping[int, Mapping[str, Any]]
"""For modules, by their number, the attributes that are others now; `MISSING` for those gone."""


class Following:
    """What a process knows of the plain attributes of its modules.

    They are looked at before every pass, so what is compared is gathered once, in flat lists.
    """

    def __init__(self) -> None:
        self._vars: list[dict[str, Any]] = []
        self._known: list[dict[str, Any]] = []
        self._unsure: dict[int, dict[str, Any]] = {}  # sent, but perhaps lost
        self._again: dict[int, dict[str, Any]] = {}
        self._gather()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """The process gets these modules, too, as they are now."""
        for module in modules:
            self._vars.append(attributes_of(module))
            self._known.append(_own(self._vars[-1]))
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
            if not value.is_inference():
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
        """What the process has to be told before the next pass."""
        now = self._now()
        same = len(now) == len(self._expected) and all(map(is_, now, self._expected))
        if same and not self._again and self._versions == list(map(_VERSION, self._tensors)):
            return {}
        news, self._again = self._again, {}
        for number, (own, known) in enumerate(zip(self._vars, self._known, strict=True)):
            found = _own(own)
            names = (name for name in {**known, **found} if known.get(name) != found.get(name))
            for name in names:
                news.setdefault(number, {})[name] = own.get(name, MISSING)
            self._known[number] = found
        self._gather()
        self._unsure = {**self._unsure, **news}
        return news

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


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What a process should know of them, in a form that can be compared."""
    return {name: _contents(value) for name, value in attributes.items() if name not in INTERNAL}


def _contents(value: Any, depth: int = 6) -> Any:
    if isinstance(value, torch.Tensor):
        return frozen(value), 0 if value.is_inference() else value._version
    if is_helper(value) and depth:
        return type(value), _contents(attributes_of(value), depth - 1)
    if isinstance(value, dict) and depth:
        items = dict.items(value)
        return type(value), tuple((frozen(k), _contents(v, depth - 1)) for k, v in items)
    if isinstance(value, (list, tuple)) and depth:
        return type(value), tuple(_contents(item, depth - 1) for item in value)
    return frozen(value)
