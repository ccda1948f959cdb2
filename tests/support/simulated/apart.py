"""Links as between processes, whose ends are in one process, on simulated devices.

Here two processes are two threads, so handles of memory and events are names of what is here.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch

from penstock.devices.accelerator import Accelerator
from penstock.devices.kind import Event
from penstock.links import local
from penstock.links.device_memory import can_cross, ends_between
from penstock.links.link import Gradients, Roots, Values
from penstock.links.shared_memory import LinkSink, LinkSource, Receiver, Sender
from penstock.links.wire import Wire
from tests.support.simulated.machine import DeviceFault, Machine, Stream
from tests.support.simulated.machine import Event as MachineEvent
from tests.support.simulated.tensors import RUNNING, SimulatedTensor

_SHARED: dict[int, Any] = {}
_numbers = count()


class _Handle:
    """What is pickled as the name of something in this process."""

    def __init__(self, thing: Any) -> None:
        self._number = next(_numbers)
        _SHARED[self._number] = thing

    def __reduce__(self) -> Any:
        return _taken, (self._number,)


def _taken(number: int) -> Any:
    return _SHARED.pop(number)


class SharedEvent(MachineEvent):
    """An event of a device that is pickled as its name."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        super().__init__(machine)
        self._device = device

    def record(self, stream: Stream) -> None:
        if stream.device != self._device:
            raise DeviceFault(f"an event of {self._device} on {stream}")
        super().record(stream)

    def __reduce__(self) -> Any:
        return _Handle(self).__reduce__()


def _shared(self: Accelerator, tensor: torch.Tensor) -> Any:
    return _Handle(tensor.detach())


def _new_shared_event(self: Accelerator, device: torch.device) -> Event:
    return SharedEvent(RUNNING.here, device)


@contextmanager
def sharing() -> Iterator[None]:
    """While open, simulated devices have memory and events that processes share."""
    with (
        mock.patch.multiple(
            Accelerator, can_share=True, shared=_shared, new_shared_event=_new_shared_event
        ),
        mock.patch(
            "penstock.links.slots.TYPES", (torch.Tensor, torch.nn.Parameter, SimulatedTensor)
        ),
    ):
        yield


class End:
    """A process's end of a connection.

    Args:
        sock: to the other end.
        device: of this process.
        peer: of the other one.
    """

    def __init__(self, sock: socket.socket, device: torch.device, peer: torch.device) -> None:
        self.dispatch = 0
        wire = Wire(sock)
        slots, arrivals = ends_between(device, peer if can_cross(device, peer) else None)
        self.sender = Sender(wire, self, slots=slots)
        self.receiver = Receiver(wire, self, arrivals)


def connected(one: torch.device, other: torch.device) -> tuple[End, End]:
    """Both ends of a connection."""
    here, there = socket.socketpair()
    return End(here, one, other), End(there, other, one)


class ApartLink:
    """Instead of a `LocalLink`, one as between two processes.

    Whoever receives waits in a queue, as there, so that threads can be run in turns.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._devices = source, target
        self.reset()

    def reset(self) -> None:
        self.first, self.second = connected(*self._devices)
        self._sink = LinkSink(self.first.sender, self.first.receiver)
        self._source = LinkSource(self.second.receiver, self.second.sender)
        self._sent, self._returned = local.SimpleQueue(), local.SimpleQueue()

    def abort(self) -> None:
        """Nothing is given up here."""

    def send(self, microbatch: int, results: Values) -> Roots:
        roots = self._sink.send(microbatch, results)
        self._sent.put(None)
        return roots

    def receive(self, microbatch: int) -> Values:
        self._sent.get()
        return self._source.receive(microbatch)

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        self._source.send_gradients(microbatch, gradients)
        self._returned.put(None)

    def receive_gradients(self, microbatch: int) -> Gradients:
        self._returned.get()
        return self._sink.receive_gradients(microbatch)

    def wait_for_copies(self, results: bool) -> None:
        (self.first if results else self.second).sender.wait_for_copies()


def across(ends: tuple[End, End], *values: Any) -> Sequence[Any]:
    """What arrives at the second end of values that the first one sends."""
    ends[0].sender.put(values)
    return ends[1].receiver.get()
