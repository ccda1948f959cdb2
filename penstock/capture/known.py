"""The names of objects while a forward is recorded."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import count
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.capture.attributes import memory_of
from penstock.capture.calls import Value


class _Living(weakref.ref[Any]):
    """An object that has a name, by its id.

    When it dies, a method written in C is called, for in the Python of a callback a Ctrl-C would
    be lost.
    """

    __slots__ = ("is_storage", "number")

    def __new__(cls, leaf: object, gone: deque[_Living]) -> _Living:
        return super().__new__(cls, leaf, gone.append)

    def __init__(self, leaf: object, gone: deque[_Living]) -> None:
        self.number = id(leaf)
        self.is_storage = isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided


class Known:
    """The names of the objects that calls have given, as long as these objects live.

    A recording keeps none of them alive that has weak references: otherwise it would need as much
    memory as all results of all calls together.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._living: dict[int, Any] = {}  # references; an id may be another object's afterwards
        self._gone: deque[_Living] = deque()  # those of objects that have died, but have names
        self._storages: dict[int, int] = {}
        self._numbers = count()
        self._memory: list[Any] = []  # weak: reserves addresses, but keeps no data

    def get(self, leaf: object) -> Value | None:
        """The value that an object is; `None` for one that nobody has named."""
        if self._gone:
            self._forget()
        return self._values.get(id(leaf))

    def put(self, leaf: object, value: Value) -> None:
        """Let an object stand for this value, as long as it lives or until it is named again."""
        self._forget()
        number = id(leaf)
        self._values[number] = value
        if number not in self._living:
            try:
                self._living[number] = _Living(leaf, self._gone)
            except TypeError:  # there are no weak references to it; it stays
                self._living[number] = leaf

    def _forget(self) -> None:
        while self._gone:
            one = self._gone.popleft()
            self._values.pop(one.number, None)
            self._living.pop(one.number, None)
            if one.is_storage:
                self._storages.pop(one.number, None)

    def storage(self, tensor: torch.Tensor) -> int:
        """A number that tensors sharing memory have in common."""
        self._forget()
        memory = memory_of(tensor)
        if memory not in self._storages:
            if tensor.layout is torch.strided:
                self._memory.append(StorageWeakRef(tensor.untyped_storage()))
            self._storages[memory] = next(self._numbers)
        return self._storages[memory]

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether any value shares this tensor's memory."""
        self._forget()
        return memory_of(tensor) in self._storages
