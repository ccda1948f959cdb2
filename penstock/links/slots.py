"""Slots: memory that one process lends to another, with the values of a boundary in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from penstock.devices.kinds import kind_of
from penstock.links.segment import ALIGNMENT, Segment, Target, TensorPlace, brought, place_of
from penstock.links.weights import Named

_ROOM = 1.25  # a slot is this much larger than what it is made for
_LEAST = 4000  # bytes; memory comes in pages, and small values differ most in how they are aligned
_MOST_TARGETS = 64  # layouts of which a slot remembers where their tensors go
PLAIN = "plain"
"""In a layout: a value that is in the message."""
MOST_LAYOUTS = 1000
"""How many are remembered, if shapes always change."""

Layout = tuple[TensorPlace | Named | str | None, ...]
"""For every value its place, or its name among the weights that both have; or `None` for no value,
or `"plain"` for one in the message."""

TYPES: tuple[type[torch.Tensor], ...] = (torch.Tensor, torch.nn.Parameter)
"""Of tensors that are nothing but elements in memory; a subclass may be anything."""

S = TypeVar("S", bound=Segment)


class Slots(Generic[S]):
    """The segments that one process lends to another.

    Args:
        make: makes one that has room for so many bytes.

    Attributes:
        alignment: of the tensors in them, in bytes.
    """

    alignment = ALIGNMENT

    def __init__(self, make: Callable[[int], S]) -> None:
        self._make = make
        self._slots: list[S] = []

    def lend(self, size: int) -> tuple[int, S, bool]:
        """The smallest that is free and large enough, and whether it had to be made."""
        fitting = [
            (slot.room, number)
            for number, slot in enumerate(self._slots)
            if slot.room >= size and not slot.lent
        ]
        number = min(fitting)[1] if fitting else len(self._slots)
        if not fitting:
            self._slots.append(self._make(max(_LEAST, int(size * _ROOM))))
        self._slots[number].lend()
        return number, self._slots[number], not fitting

    @property
    def every(self) -> Sequence[S]:
        """All segments, whether they are lent or not."""
        return self._slots

    def wait_for_copies(self) -> None:
        """Let what follows wait until all values have been copied into slots: they have been."""


class Arrivals:
    """The slots that another process has lent to this one.

    Args:
        device: where their values are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._segments: dict[int, Segment] = {}

    def open(self, number: int, size: int, fd: int) -> None:
        """Have a slot.

        Args:
            number: its number.
            size: of its segment, in bytes.
            fd: the segment's, which is closed.
        """
        self._segments[number] = Segment(size, fd)

    def take(self, number: int, places: Sequence[TensorPlace]) -> list[torch.Tensor]:
        """The tensors in a slot, for what follows on the current stream.

        The slot is free again when nobody uses its memory any more.

        Args:
            number: of the slot; -1 for tensors without elements.
            places: where they are.
        """
        memory = self._segments[number].borrow() if number >= 0 else memoryview(b"")
        return [brought(place.alone(memory), self._device, place.shift) for place in places]


class Slot(Segment):
    """A segment with the values of a boundary in it."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        super().__init__(size, fd)
        self._targets: dict[int, list[Target | None]] = {}

    def fill(self, number: int, layout: Layout, values: Sequence[Any]) -> None:
        """Copy the tensors among some values to their places; gradients are off.

        Args:
            number: of the layout, which has the same places whenever it has the same number.
            layout: the places.
            values: as many.
        """
        targets = self._targets.get(number)
        if targets is None:
            targets = [self._target(p) if isinstance(p, TensorPlace) else None for p in layout]
            if len(self._targets) >= _MOST_TARGETS:
                self._targets.clear()
            self._targets[number] = targets
        for target, value in zip(targets, values, strict=True):
            if target is not None:
                target.fill(value)

    def forget_layouts(self) -> None:
        """From now on a layout's number stands for another layout."""
        self._targets.clear()

    def _target(self, place: TensorPlace) -> Target:
        return place.target(self.base)


def laid_out(
    values: Sequence[Any], names: Mapping[int, Named] | None = None, alignment: int = ALIGNMENT
) -> tuple[Layout, int]:
    """Where values go in a slot, and how many bytes that takes.

    Args:
        values: tensors, and others.
        names: of those that are only named.
        alignment: of the slot, in bytes.
    """
    layout: list[TensorPlace | Named | str | None] = []
    size = 0
    for k, value in enumerate(values):
        if names and k in names:
            layout.append(names[k])
        elif isinstance(value, torch.Tensor) and is_plain(value):
            place = place_of(value, size, alignment)
            size = place.end
            layout.append(place)
        else:
            layout.append(None if value is None else PLAIN)
    return tuple(layout), size


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but elements in memory, which can be copied."""
    return (
        type(tensor) in TYPES
        and tensor.layout is torch.strided
        and (tensor.device.type == "cpu" or kind_of(tensor.device).has_streams)
        and not tensor.is_quantized
    )
