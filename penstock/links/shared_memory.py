"""The link between two processes of one machine: values are copied once, into shared memory.

The sender copies a boundary's values into a slot and sends a message of a few bytes; the receiver
works on the slot in place, as long as anything refers to it: until the backward of that
micro-batch, usually. Then the slot is free for another. There are as many slots as that takes.
How a slot is laid out is sent once, with the first values of those shapes.

A weight that both processes map is not copied: the message says which it is (`weights.py`).

Messages are short, whatever is sent, so that a socket has room for many; what is pickled and long
goes through a slot, too. Who waits for room takes in what comes meanwhile (`intake.py`).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cloudpickle
import msgspec
import torch

from penstock.links.link import Gradients, InDispatch, Roots, Values, edges
from penstock.links.segment import Segment, TensorPlace, shift_of
from penstock.links.slots import (
    MOST_LAYOUTS,
    PLAIN,
    Arrivals,
    Layout,
    Slot,
    Slots,
    is_plain,
    laid_out,
)
from penstock.links.weights import Named, Weights
from penstock.links.wire import Wire


class Lent(msgspec.Struct, array_like=True, frozen=True):
    """Values that another process is lent, as a part of a message to it.

    Attributes:
        slot: the number of the segment that they are in, or -1 if they take no memory.
        size: bytes of that segment, if its file descriptor comes along; else 0.
        layout: the number of the layout.
        new_layout: the layout itself, pickled, if the other process does not know it yet.
        plain: those that are no tensors, pickled, if there are any.
    """

    slot: int
    size: int
    layout: int
    new_layout: bytes
    plain: bytes


class Boundary(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The values of a boundary, or their gradients; sent in the jobs of this number.

    Attributes:
        dispatch: the number of the jobs.
        values: where they are.
        is_apart: whether what is pickled came with the message before.
    """

    dispatch: int
    values: Lent
    is_apart: bool = False


class Pickled(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """What is pickled of the values that come next, as `Boundary` would have it.

    Attributes:
        values: where it is: the bytes of a message.
        size: how many of them count.
    """

    values: Lent
    size: int


_LONG = 8192  # bytes; a socket that can be written to has room for more
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Boundary | Pickled).decode
_decode_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


class Lender:
    """Copies values into slots, of which messages to another process then speak.

    Args:
        wire: to it.
        weights: that the other process has, too.
        slots: for the values; by default in memory of the CPU.
    """

    def __init__(
        self, wire: Wire, weights: Weights | None = None, slots: Slots[Slot] | None = None
    ) -> None:
        self._wire = wire
        self._weights = weights
        self._slots = slots or Slots(Slot)
        self._sent: set[int] = set()  # of the slots, those that the other process has
        self._announced: set[int] = set()  # of the layouts, those that it knows
        self._layouts: dict[Layout, int] = {}
        self._known: dict[tuple[Any, ...], _Known] = {}

    def lend(self, values: Sequence[Any]) -> Loan:
        """Copy values: tensors, `None`, or whatever can be pickled.

        Returns:
            what is to be sent, within `with`.
        """
        weights = self._weights
        signature = tuple([_signature(value, weights) for value in values])
        known = self._known.get(signature) or self._learn(signature, values)
        slot, segment, size = -1, None, 0
        if known.size:
            slot, segment, _ = self._slots.lend(known.size)
        try:
            if segment is not None:
                with torch.no_grad():
                    segment.fill(known.number, known.layout, values)
                size = 0 if slot in self._sent else segment.size
            new_layout = b"" if known.number in self._announced else pickle.dumps(known.layout)
            plain = [v for p, v in zip(known.layout, values, strict=True) if p is PLAIN]
            lent = Lent(
                slot, size, known.number, new_layout, cloudpickle.dumps(plain) if plain else b""
            )
        except BaseException:
            if segment is not None:
                segment.free()
            raise
        return Loan(self, lent, segment)

    def sent(self, lent: Lent, segment: Segment | None) -> None:
        """Note that a loan was sent, so that the other process has its layout and its slot."""
        self._announced.add(lent.layout)
        if segment is not None:
            segment.close()  # of its file descriptor
            self._sent.add(lent.slot)

    def not_sent(self, segment: Segment | None) -> None:
        """Free the slot of a loan that was not sent, unless a part of the message was."""
        if segment is not None and not self._wire.busy:
            segment.free()

    def _learn(self, signature: tuple[Any, ...], values: Sequence[Any]) -> _Known:
        """Lay out values that are like none before."""
        if len(self._known) >= MOST_LAYOUTS:  # numbers begin anew; the other process follows
            self._known.clear()
            self._layouts.clear()
            self._announced.clear()
            for slot in self._slots.every:
                slot.forget_layouts()
        names = {k: name for k, name in enumerate(signature) if isinstance(name, Named)}
        layout, size = laid_out(values, names, self._slots.alignment)
        number = self._layouts.setdefault(layout, len(self._layouts))
        known = self._known[signature] = _Known(number, layout, size)
        return known

    def wait_for_copies(self) -> None:
        """Let what follows wait until all values have been copied: they may be written then."""
        self._slots.wait_for_copies()


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


class Loan:
    """Values in a slot. The message that speaks of them is sent while this is open.

    Attributes:
        lent: a part of that message.
        fd: the file descriptor that goes with it, or -1.
    """

    __slots__ = ("_lender", "_segment", "fd", "lent")

    def __init__(self, lender: Lender, lent: Lent, segment: Segment | None) -> None:
        self.lent = lent
        self.fd = segment.fd if segment is not None and lent.size else -1
        self._lender = lender
        self._segment = segment

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._lender.sent(self.lent, self._segment)
        else:
            self._lender.not_sent(self._segment)


class Borrower:
    """Gives out values that the other process has put into slots.

    Args:
        arrivals: the slots.
        weights: that this process has in common with the other one.
    """

    def __init__(self, arrivals: Arrivals, weights: Weights | None = None) -> None:
        self._arrivals = arrivals
        self._weights = weights or Weights()
        self._layouts: dict[int, Layout] = {}

    def borrow(self, lent: Lent, fd: int) -> Values:
        """The values of which a message speaks.

        Args:
            lent: where they are.
            fd: the file descriptor that came along, or -1.
        """
        return self.take(self.note(lent, fd))

    def note(self, lent: Lent, fd: int) -> Noted:
        """Take note of a message; this must be done with every one, in order.

        Args:
            lent: where the values are of which it speaks.
            fd: the file descriptor that came along, or -1.
        """
        if lent.new_layout:
            self._layouts[lent.layout] = pickle.loads(lent.new_layout)
        if fd >= 0:
            self._arrivals.open(lent.slot, lent.size, fd)
        return Noted(lent, self._layouts[lent.layout])

    def take(self, noted: Noted) -> Values:
        """The values of a message, which are wanted now; this must be done once for each."""
        lent, layout = noted
        places = [place for place in layout if isinstance(place, TensorPlace)]
        tensors = iter(self._arrivals.take(lent.slot, places))
        remaining = iter(pickle.loads(lent.plain) if lent.plain else ())
        values: list[Any] = [None] * len(layout)
        for k, place in enumerate(layout):
            if isinstance(place, TensorPlace):
                tensor = next(tensors)
                values[k] = tensor.requires_grad_() if place.requires_grad else tensor
            elif isinstance(place, Named):
                values[k] = self._weights.named(place)
            elif place is not None:
                values[k] = next(remaining)
        return tuple(values)


class Noted(NamedTuple):
    """A message that was read, and whose values are not in use yet.

    Attributes:
        lent: where they are.
        layout: how they lie there.
    """

    lent: Lent
    layout: Layout


def _signature(value: Any, weights: Weights | None) -> Any:
    """Equal for values that are laid out in the same way."""
    if not isinstance(value, torch.Tensor):
        return None if value is None else PLAIN
    if not is_plain(value):
        return PLAIN
    if weights is not None and (name := weights.name(value)) is not None:
        return name
    return value.dtype, value.shape, value.stride(), shift_of(value), value.requires_grad


class Taker(Protocol):
    """Takes values to another process."""

    def put(self, values: Sequence[Any]) -> None:
        """Send a micro-batch's values; may wait for room."""


class Giver(Protocol):
    """Gives values that come from another process."""

    def get(self) -> Values:
        """The next; waits for them."""

    def get_nowait(self) -> Values | None:
        """The next, if they are there."""


class Sender(Lender):
    """Sends the values of boundaries.

    Args:
        wire: to the other process.
        owner: knows the number of the jobs that run now.
        wait: called before a message is sent; returns when there is room for one.
        weights: that the other process has, too.
        slots: for the values; by default in memory of the CPU.
    """

    def __init__(
        self,
        wire: Wire,
        owner: InDispatch,
        wait: Callable[[], None] | None = None,
        weights: Weights | None = None,
        slots: Slots[Slot] | None = None,
    ) -> None:
        super().__init__(wire, weights, slots)
        self._owner = owner
        self._wait = wait
        self._aside: Lender | None = None  # for what is pickled and long

    def put(self, values: Sequence[Any]) -> None:
        """Send the values of a boundary: tensors, `None`, or whatever can be pickled.

        Raises:
            Gone: the other process is gone.
            Exception: a value cannot be pickled, or what `wait` raises; no values have been sent.
        """
        with self.lend(values) as loan:
            lent = loan.lent
            is_apart = len(lent.new_layout) + len(lent.plain) > _LONG
            if is_apart:
                self._put_aside(_encode((lent.new_layout, lent.plain)))
                lent = msgspec.structs.replace(lent, new_layout=b"", plain=b"")
            self._send(Boundary(self._owner.dispatch, lent, is_apart), loan)

    def _put_aside(self, data: bytes) -> None:
        """Send bytes by way of a slot in memory of the CPU."""
        if self._aside is None:
            self._aside = Lender(self._wire)
        room = bytearray(1 << (len(data) - 1).bit_length())  # so that there are few layouts
        room[: len(data)] = data
        with self._aside.lend([torch.frombuffer(room, dtype=torch.uint8)]) as loan:
            self._send(Pickled(loan.lent, len(data)), loan)

    def _send(self, message: Boundary | Pickled, loan: Loan) -> None:
        if self._wait is not None:
            self._wait()
        self._wire.send(_encode(message), loan.fd)


class Receiver:
    """Receives the values of boundaries.

    Args:
        wire: from the other process.
        owner: knows the number of the jobs that run now; messages of earlier ones are thrown away.
        arrivals: the slots that the other process lends.
        wait: called before a message is read; returns when there is one.
        weights: that this process has in common with the other one.
    """

    def __init__(
        self,
        wire: Wire,
        owner: InDispatch,
        arrivals: Arrivals,
        wait: Callable[[], None] | None = None,
        weights: Weights | None = None,
    ) -> None:
        self._wire = wire
        self._owner = owner
        self._wait = wait
        self._borrower = Borrower(arrivals, weights)
        self._aside = Borrower(Arrivals(torch.device("cpu")))
        self._pickled = b""  # of the values that come next
        self._come: deque[tuple[int, Noted]] = deque()  # with the numbers of their jobs

    def fileno(self) -> int:
        """The file descriptor at which messages come."""
        return self._wire.fileno()

    def take_in(self) -> None:
        """Read the messages that have come, so that there is room for others.

        Raises:
            Gone: the other process is gone.
        """
        while self._wire.ready():
            self._read_message()

    def get(self) -> Values:
        """The next values; waits for them.

        Raises:
            Gone: the other process is gone.
            Exception: what `wait` raises.
        """
        while (values := self._next()) is None:
            if self._wait is not None:
                self._wait()
            self._read_message()
        return values

    def get_nowait(self) -> Values | None:
        """The next values, if they are there.

        Raises:
            Gone: the other process is gone.
        """
        self.take_in()
        return self._next()

    def _next(self) -> Values | None:
        """The oldest values that were read; those of earlier jobs are thrown away."""
        while self._come:
            dispatch, noted = self._come.popleft()
            values = self._borrower.take(noted)
            if dispatch >= self._owner.dispatch:
                return values
        return None

    def _read_message(self) -> None:
        """Read one message."""
        data, fd = self._wire.receive()
        message = _decode(data)
        if isinstance(message, Pickled):
            (room,) = self._aside.borrow(message.values, fd)
            self._pickled = room[: message.size].numpy().tobytes()
            return
        lent = message.values
        if message.is_apart:
            new_layout, plain = _decode_pair(self._pickled)
            lent = msgspec.structs.replace(lent, new_layout=new_layout, plain=plain)
            self._pickled = b""
        self._come.append((message.dispatch, self._borrower.note(lent, fd)))


class LinkSink:
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


class LinkSource:
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
