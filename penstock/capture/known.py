"""Which values the tensors of a recording are, and which of them share memory."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.capture.calls import Value


class Known:
    """The names of the objects that calls have given, as long as these live.

    Whoever else holds them does: a recording keeps nothing alive, for then it would need as much
    memory as all results of all calls together.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._living: dict[int, Any] = {}  # references; an id may be another object's afterwards
        self._storages: dict[int, int] = {}
        self._numbers = count()
        self._memory: list[Any] = []  # keeps addresses of storages apart, but not what is there

    def get(self, leaf: Any) -> Value | None:
        """The value that an object is; `None` for one that nobody has named."""
        return self._values.get(id(leaf))

    def put(self, leaf: Any, value: Value) -> None:
        """Name an object from here on."""
        number = id(leaf)
        self._values[number] = value
        if number not in self._living:
            self._living[number] = self._reference(leaf, number)

    def _reference(self, leaf: Any, number: int) -> Any:
        values, living, storages = self._values, self._living, self._storages
        is_storage = isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided

        def forget(_: Any) -> None:
            values.pop(number, None)
            living.pop(number, None)
            if is_storage:
                storages.pop(number, None)

        try:
            return weakref.ref(leaf, forget)
        except TypeError:  # there are no weak references to it; it stays
            return leaf

    def storage(self, tensor: torch.Tensor) -> int:
        """A number that tensors sharing memory have in common."""
        memory = _memory(tensor)
        if memory not in self._storages:
            if tensor.layout is torch.strided:
                self._memory.append(StorageWeakRef(tensor.untyped_storage()))
            self._storages[memory] = next(self._numbers)
        return self._storages[memory]

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether any value shares this tensor's memory."""
        return _memory(tensor) in self._storages


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
