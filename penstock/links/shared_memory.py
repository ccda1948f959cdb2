"""The link between two processes of one machine: values are copied once, into shared memory.

The sender copies a boundary's values into a slot and sends a message of a few bytes; the receiver
works on the slot in place, as long as anything refers to it: until the backward of that
micro-batch, usually. Then the slot is free for another. There are as many slots as that takes.
How a slot is laid out is sent once, with the first values of those shapes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import torch

from penstock.links.link import Gradients, InDispatch, Roots, Values, edges
from penstock.links.segment import ALIGNMENT, Place, Segment, Target, place_of
from penstock.links.wire import Message, Wire

_ROOM = 1.25  # a slot is this much larger than what it is made for
_LEAST = 4000  # bytes; memory comes in pages, and small values differ most in how they are aligned
PLAIN = "plain"
"""In a layout: a value that is in the message."""
_MOST = 1000  # of what is remembered of layouts, if shapes always change

Layout = tuple[Place | str | None, ...]
"""For every value its place; or `None` for no value, or `"plain"` for one in the message."""

"""Gives the number of the jobs that run now; messages of earlier ones are thrown away."""


class Slots:
    """The segments that one process lends to another."""

    def __init__(self) -> None:
        self._slots: list[Segment] = []

    def lend(self, size: int) -> tuple[int, Segment, bool]:
        """The smallest that is free and large enough, and whether it had to be made."""
        fitting = [
            (slot.size, number)
            for number, slot in enumerate(self._slots)
            if slot.size >= size and not slot.lent
        ]
        number = min(fitting)[1] if fitting else len(self._slots)
        if not fitting:
            self._slots.append(Segment(max(_LEAST, int(size * _ROOM))))
        self._slots[number].lend()
        return number, self._slots[number], not fitting


class Sender:
    """Copies values into slots, and tells the other process.

    Args:
        wire: to it.
        owner: knows the number of the jobs that run now.
        wait: called before a message is sent; returns when there is room for one.
    """

    def __init__(
        self, wire: Wire, owner: InDispatch, wait: Callable[[], None] = lambda: None
    ) -> None:
        self._wire = wire
        self._owner = owner
        self._wait = wait
        self._slots = Slots()
        self._sent: set[int] = set()  # of the slots, those that the other process has
        self._announced: set[int] = set()  # of the layouts, those that it knows
        self._layouts: dict[Layout, int] = {}
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._targets: dict[tuple[int, int], list[Target | None]] = {}

    def put(
        self,
        values: Sequence[Any],
        kind: int = 0,
        payload: bytes = b"",
        timeout: float | None = None,
    ) -> None:
        """Send values: tensors, `None`, or whatever can be pickled.

        Raises:
            Gone: the other process is gone.
            TimeoutError: it did not read for so many seconds.
            Exception: a value cannot be pickled, or what `wait` raises; nothing has been sent.
        """
        signature = tuple([_signature(value) for value in values])
        known = self._known.get(signature) or self._learn(signature, values)
        slot, segment = -1, None
        if known.size:
            slot, segment, _ = self._slots.lend(known.size)
        try:
            self._put(values, known, slot, segment, kind, payload, timeout)
        except BaseException:
            if segment is not None and not self._wire.busy:
                segment.free()
            raise

    def _put(
        self,
        values: Sequence[Any],
        known: _Known,
        slot: int,
        segment: Segment | None,
        kind: int,
        payload: bytes,
        timeout: float | None,
    ) -> None:
        fd, capacity = -1, 0
        if segment is not None:
            with torch.no_grad():
                targets = self._targets_in(slot, segment, known)
                for target, value in zip(targets, values, strict=True):
                    if target is not None:
                        target.fill(value)
            if slot not in self._sent:
                fd, capacity = segment.fd, segment.size
        news = None if known.number in self._announced else known.layout
        plain = [v for p, v in zip(known.layout, values, strict=True) if p is PLAIN]
        if news is not None or plain or payload:
            payload = pickle.dumps((news, cloudpickle.dumps(plain) if plain else b"", payload))
        self._wait()
        message = Message(self._owner.dispatch, kind, slot, known.number, payload, fd, capacity)
        self._wire.send(message, timeout)
        self._announced.add(known.number)  # only now: what was not sent is not known there
        if segment is not None:
            segment.close()  # of its file descriptor
        self._sent.add(slot)

    def _learn(self, signature: tuple[Any, ...], values: Sequence[Any]) -> _Known:
        """Lay out values that are like none before."""
        layout, size = laid_out(values)
        number = self._layouts.setdefault(layout, len(self._layouts))
        if len(self._known) >= _MOST:
            self._known.clear()
        known = self._known[signature] = _Known(number, layout, size)
        return known

    def _targets_in(self, slot: int, segment: Segment, known: _Known) -> list[Target | None]:
        """Where the values of a layout go in a slot."""
        targets = self._targets.get((slot, known.number))
        if targets is None:
            storage = segment.base.untyped_storage()
            targets = [p.target(storage) if isinstance(p, Place) else None for p in known.layout]
            if len(self._targets) >= _MOST:
                self._targets.clear()
            self._targets[slot, known.number] = targets
        return targets


@dataclass(frozen=True)
class _Known:
    """How values of some shapes are laid out.

    Attributes:
        number: of the layout.
        layout: itself.
        size: bytes that it takes.
    """

    number: int
    layout: Layout
    size: int


class Receiver:
    """Gives out values that the other process has put into slots.

    Args:
        wire: from it.
        owner: knows the number of the jobs that run now.
        device: where the values are wanted.
        wait: called before a message is read; returns when there is one.
    """

    def __init__(
        self,
        wire: Wire,
        owner: InDispatch,
        device: torch.device,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire = wire
        self._owner = owner
        self._device = device
        self._wait = wait
        self._slots: dict[int, Segment] = {}
        self._layouts: dict[int, Layout] = {}

    def get(self) -> Values:
        """The next values; waits for them.

        Raises:
            Gone: the other process is gone.
            Exception: what `wait` raises.
        """
        while True:
            self._wait()
            message = self._wire.receive()
            values, _ = self.opened(message)
            if message.dispatch >= self._owner.dispatch:
                return values

    def opened(self, message: Message) -> tuple[Values, bytes]:
        """The values that a message speaks of, and its payload. Every message must be opened."""
        plain, payload = b"", b""
        if message.payload:
            layout, plain, payload = pickle.loads(message.payload)
            if layout is not None:
                self._layouts[message.layout] = layout
        if message.fd >= 0:
            self._slots[message.slot] = Segment(message.size, message.fd)
        values: list[Any] = [None] * len(self._layouts[message.layout])
        remaining = iter(pickle.loads(plain)) if plain else iter(())
        memory = None
        if message.slot >= 0:
            memory = self._slots[message.slot].borrow()
        for k, place in enumerate(self._layouts[message.layout]):
            if isinstance(place, Place):
                values[k] = self._arrived(place, memory)
            elif place is not None:
                values[k] = next(remaining)
        return tuple(values), payload

    def _arrived(self, place: Place, memory: memoryview | None) -> torch.Tensor:
        if memory is None:
            tensor = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        else:
            tensor = place.alone(memory)
        if self._device.type != "cpu":
            tensor = tensor.to(self._device)
        return tensor.requires_grad_() if place.requires_grad else tensor


def _signature(value: Any) -> Any:
    """Equal for values that are laid out in the same way."""
    if not isinstance(value, torch.Tensor):
        return None if value is None else PLAIN
    if not is_plain(value):
        return PLAIN
    shift = value.data_ptr() % ALIGNMENT
    return value.dtype, value.shape, value.stride(), shift, value.requires_grad


def laid_out(values: Sequence[Any]) -> tuple[Layout, int]:
    """Where values go in a slot, and how many bytes that takes."""
    layout: list[Place | str | None] = []
    size = 0
    for value in values:
        if isinstance(value, torch.Tensor) and is_plain(value):
            place = place_of(value, size)
            size = place.end
            layout.append(place)
        else:
            layout.append(None if value is None else PLAIN)
    return tuple(layout), size


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but elements in memory, which can be copied."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
    )


class Taker(Protocol):
    """Takes values to another process."""

    def put(self, values: Sequence[Any]) -> None:
        """Send a micro-batch's values; may wait for room."""


class Giver(Protocol):
    """Gives values that come from another process."""

    def get(self) -> Values:
        """The next; waits for them."""


class Sink:
    """The earlier stage's end of a link to another process.

    Args:
        out: takes the values.
        back: gives their gradients.
    """

    def __init__(self, out: Taker, back: Giver) -> None:
        self._out = out
        self._back = back

    def send(self, microbatch: int, results: Values) -> Roots:
        """Copy a micro-batch's values to the other process."""
        self._out.put(results)
        return edges(results)

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The next micro-batch's gradients; waits for them."""
        return self._back.get()


class Source:
    """The later stage's end of a link to another process.

    Args:
        come: gives the values.
        back: takes their gradients.
    """

    def __init__(self, come: Giver, back: Taker) -> None:
        self._come = come
        self._back = back

    def receive(self, microbatch: int) -> Values:
        """The next micro-batch's values; waits for them."""
        return self._come.get()

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Copy the gradients of a micro-batch's values to the other process."""
        self._back.put(gradients)
