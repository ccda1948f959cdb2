"""Slots on a device whose memory two processes have, so that values stay off the CPU.

The sender copies the values of a boundary into a slot on its own device, and the receiver from
there to its own. Both use streams of their own, and both only give these copies to their devices:
neither a process nor what it computes waits for a copy that it does not need.

Each slot has an event that both processes have. Whoever used the slot last has recorded it, and the
other one lets its copies wait for it. So a slot is free for other values as soon as the receiver
has given the copies to its device.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from penstock.devices.kind import DeviceKind, Event, Stream
from penstock.devices.kinds import kind_of
from penstock.devices.streams import Copies, used_on
from penstock.links.segment import DEVICE_ALIGNMENT, Target, TensorPlace
from penstock.links.slots import Arrivals, Layout, Slot, Slots


def can_cross(one: torch.device, other: torch.device) -> bool:
    """Whether processes of one machine with these devices can have slots on them."""
    kind = kind_of(one)
    return one.type == other.type and kind.has_streams and kind.can_share


def link_in_words(one: torch.device, other: torch.device) -> str:
    """How values get from one of two processes with these devices to the other."""
    return f"shared memory ({one.type})" if can_cross(one, other) else "shared memory"


class DeviceSlots(Slots["DeviceSlot"]):
    """Slots on the device of a sender.

    Args:
        device: the device.
    """

    alignment = DEVICE_ALIGNMENT

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self._stream = self._kind.new_stream(device)
        super().__init__(self._made)

    def _made(self, room: int) -> DeviceSlot:
        with torch.inference_mode(False), self._kind.using(self._stream):
            memory = torch.empty(room, dtype=torch.uint8, device=self._device)
        return DeviceSlot(self._kind, self._stream, memory)

    def wait_for_copies(self) -> None:
        """Let what follows wait until all values have been copied into slots."""
        self._kind.current_stream(self._device).wait_event(self._stream.record_event())


class DeviceSlot(Slot):
    """A slot on a device; its segment has the handles by which another process has it, too.

    Args:
        kind: of the device.
        stream: on which values are copied into it.
        memory: for them, which was allocated on this stream.

    Raises:
        RuntimeError: the driver or the allocator does not share memory.
    """

    def __init__(self, kind: DeviceKind, stream: Stream, memory: torch.Tensor) -> None:
        self._kind, self._stream, self._memory = kind, stream, memory
        self._last = kind.new_shared_event(memory.device)
        handles = pickle.dumps((kind.shared(memory), self._last))
        super().__init__(len(handles))
        self.base[:] = torch.frombuffer(bytearray(handles), dtype=torch.uint8)
        self.room = memory.numel()

    def fill(self, number: int, layout: Layout, values: Sequence[Any]) -> None:
        """Copy values when they are there and the receiver has read those before them."""
        here = self._kind.current_stream(self._memory.device)
        self._stream.wait_event(here.record_event())
        self._stream.wait_event(self._last)
        with self._kind.using(self._stream):
            super().fill(number, layout, values)
        self._stream.record_event(self._last)
        pairs = zip(layout, values, strict=True)
        used_on(self._stream, [value for p, value in pairs if isinstance(p, TensorPlace)])

    def _target(self, place: TensorPlace) -> Target:
        return place.target(self._memory)


class DeviceArrivals(Arrivals):
    """Slots on the device of another process.

    Args:
        source: that device.
        device: where their values are wanted.
    """

    def __init__(self, source: torch.device, device: torch.device) -> None:
        super().__init__(device)
        self._copies = Copies(source, device, sparse=True)
        self._opened: dict[int, tuple[torch.Tensor, Event]] = {}

    def take(self, number: int, places: Sequence[TensorPlace]) -> list[torch.Tensor]:
        """Copies of the tensors in a slot, for what follows on the current stream.

        Raises:
            RuntimeError: the driver does not let this process have the slot; or there is no memory
                for the copies. The slot is free.
        """
        if number < 0:
            return super().take(number, places)
        segment = self._segments[number]
        try:
            if number not in self._opened:
                self._opened[number] = pickle.loads(segment.base.numpy().data)
            memory, last = self._opened[number]
            values = [place.within(memory) for place in places]
            copies, arrival = self._copies.start(values, made=last, read=last)
        finally:
            segment.free()
        self._copies.wait(copies, arrival)
        return [*copies]


def ends_between(
    device: torch.device, peer: torch.device | None
) -> tuple[Slots[Any] | None, Arrivals]:
    """For one end of a link, slots for what it sends, and those that it receives.

    Args:
        device: of this process.
        peer: that of the other one, if `can_cross` says so of both; else `None`, and values go by
            way of the CPU.
    """
    if peer is None:
        return None, Arrivals(device)
    return DeviceSlots(device), DeviceArrivals(peer, device)
