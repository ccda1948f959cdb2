"""The link between two machines: `torch.distributed` point to point, one message for a boundary.

The values of a boundary are packed into one buffer, laid out as in a shared-memory slot, which is
sent as one message; the receiver works on the buffer in place. With each message the sender
announces the size of the next one, which it knows from the sizes of the inputs once it has sent a
message of that kind. So the receive is posted before the sender has computed anything, and nothing
has to be read first to learn the size. A message that turns out smaller than announced is padded;
if it is larger, the rest follows as a second message.

Beside the process group there is a socket, on which a signal of a few bytes goes with every
message. That is what the receiver waits for, together with the sockets on which a failure is
reported: a receive of gloo can neither be polled nor given up. How values are laid out goes with
the signal, once for each layout, and the receiver acknowledges what it has, so that the sender
lets go of it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import torch
import torch.distributed as dist

from penstock.links.link import InDispatch, Values
from penstock.links.segment import TensorPlace, brought
from penstock.links.slots import MOST_LAYOUTS, PLAIN, Layout, laid_out
from penstock.links.wire import Gone, Wire


class Signal(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """That values are on their way.

    Attributes:
        dispatch: the number of the jobs in which they were sent.
        size: bytes of them.
        next_size: of those after them; 0 if that is not known.
        layout: the number of the layout.
        new_layout: the layout itself, pickled, if the receiver does not know it yet.
        plain: those that are no tensors, pickled, if there are any.
    """

    dispatch: int
    size: int
    next_size: int
    layout: int
    new_layout: bytes
    plain: bytes


class Have(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """That the oldest values which were not yet acknowledged have arrived."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Signal | Have).decode


class Peer(NamedTuple):
    """The process at the other end, as seen by `torch.distributed`.

    Attributes:
        rank: its number.
        out: the group in which it is sent to.
        back: the group in which it sends. (A communicator of NCCL works in order, so a receive
            that is posted ahead would hold up whatever is sent in the same one.)
        memory: the device of the buffers.
    """

    rank: int
    out: dist.ProcessGroup
    back: dist.ProcessGroup
    memory: torch.device


class GroupEnd:
    """One end of a link to another machine; values leave here, and others arrive.

    Args:
        wire: for signals.
        peer: the other end.
        owner: knows the number of the jobs that run now; messages of earlier ones are thrown away.
        device: where the values are wanted.
        wait: called before a signal is read; returns when there is one.
        left: gives the seconds that a message may take.
    """

    def __init__(
        self,
        wire: Wire,
        peer: Peer,
        owner: InDispatch,
        device: torch.device,
        wait: Callable[[], None],
        left: Callable[[], float],
    ) -> None:
        self._wire = wire
        self._peer = peer
        self._owner = owner
        self._device = device
        self._wait = wait
        self._left = left
        self._signals: deque[Signal] = deque()
        # what is sent
        self._numbers: dict[Layout, int] = {}
        self._awaited = 0  # bytes of the next message, which the other end awaits
        self._sizes: dict[Hashable, int] = {}
        self._coming: Sequence[Hashable] = (None,)
        self._at = 0
        self._under_way: deque[list[tuple[torch.Tensor, Any]]] = deque()
        # what is received
        self._layouts: dict[int, Layout] = {}
        self._posted: tuple[torch.Tensor, Any] | None = None

    def expect(self, kinds: Sequence[Hashable]) -> None:
        """Set the kinds of the next messages to be sent, by which their sizes are predicted.

        Args:
            kinds: one for each message, in order; begins again after the last. Messages of one
                kind mostly have the same size.
        """
        self._coming, self._at = kinds, 0

    # -- sending --------------------------------------------------------------------------

    def put(self, values: Sequence[Any]) -> None:
        """Send values: tensors, `None`, or whatever can be pickled.

        Raises:
            Gone: the other process is gone.
            TimeoutError: it does not read.
        """
        while self._wire.ready():  # whatever it has sent meanwhile
            self._read_message()
        layout, size = laid_out(values)
        # What may fail comes first: the receiver waits for all that is announced to it.
        found = [v for p, v in zip(layout, values, strict=True) if p is PLAIN]
        plain = cloudpickle.dumps(found) if found else b""
        whole = max(size, self._awaited)
        buffer = self._packed(layout, values, whole) if whole else None
        number, new_layout = self._numbers.get(layout), b""
        if number is None:
            if len(self._numbers) >= MOST_LAYOUTS:  # they begin anew; the other process follows
                self._numbers.clear()
            number = self._numbers[layout] = len(self._numbers)
            new_layout = pickle.dumps(layout)
        awaited, self._awaited = self._awaited, self._next_size(size)
        signal = Signal(self._owner.dispatch, size, self._awaited, number, new_layout, plain)
        self._wire.send(_encode(signal), -1, self._left())
        if buffer is not None:
            parts = [buffer[:awaited], buffer[awaited:]] if awaited else [buffer]
            self._under_way.append([(part, self._send(part)) for part in parts if len(part)])
        else:
            self._under_way.append([])

    def _next_size(self, size: int) -> int:
        """Note that this message has `size` bytes; returns the next one's size, 0 if unknown."""
        if len(self._sizes) >= MOST_LAYOUTS:
            self._sizes.clear()
        self._sizes[self._coming[self._at]] = size
        self._at = (self._at + 1) % len(self._coming)
        return self._sizes.get(self._coming[self._at], 0)

    def _packed(self, layout: Layout, values: Sequence[Any], size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._peer.memory)
        with torch.no_grad():
            for place, value in zip(layout, values, strict=True):
                if isinstance(place, TensorPlace):
                    place.target(buffer).fill(value.detach())
        return buffer

    def _send(self, part: torch.Tensor) -> Any:
        try:
            return dist.isend(part, group=self._peer.out, group_dst=self._other(self._peer.out))
        except RuntimeError as error:
            raise self._lost(error) from error

    # -- receiving ------------------------------------------------------------------------

    def get(self) -> Values:
        """The next values; waits for them.

        Raises:
            Gone: the other process is gone.
            Exception: what `wait` raises.
        """
        while True:
            while not self._signals:
                self._wait()
                self._read_message()
            values = self._next()
            if values is not None:
                return values

    def get_nowait(self) -> Values | None:
        """The next values, if it is known that they are sent; waits until all of them are here.

        Raises:
            Gone: the other process is gone.
        """
        while True:
            while self._wire.ready():
                self._read_message()
            if not self._signals:
                return None
            values = self._next()
            if values is not None:
                return values

    def _next(self) -> Values | None:
        """The values of which the oldest signal speaks; `None` if they are of earlier jobs."""
        signal = self._signals.popleft()
        values = self._received(signal)
        return values if signal.dispatch >= self._owner.dispatch else None

    def _read_message(self) -> None:
        message = _decode(self._wire.receive().data)
        if isinstance(message, Signal):
            self._signals.append(message)
        else:
            for _, work in self._under_way.popleft():
                self._finished(work)

    def _received(self, signal: Signal) -> Values:
        """The values of which a signal speaks."""
        if signal.new_layout:
            self._layouts[signal.layout] = pickle.loads(signal.new_layout)
        base = self._content(signal.size)
        if signal.next_size:
            self._posted = self._post(self._buffer(signal.next_size))
        self._wire.send(_encode(Have()), -1, self._left())
        layout = self._layouts[signal.layout]
        values: list[Any] = [None] * len(layout)
        remaining = iter(pickle.loads(signal.plain) if signal.plain else ())
        memory = base.numpy().data if base.device.type == "cpu" else None
        for k, place in enumerate(layout):
            if isinstance(place, TensorPlace):
                tensor = place.of(base.untyped_storage()) if memory is None else place.alone(memory)
                if self._device.type != tensor.device.type:
                    tensor = brought(tensor, self._device, place.shift)
                values[k] = tensor.requires_grad_(place.requires_grad)
            elif place is not None:
                values[k] = next(remaining)
        return tuple(values)

    def _content(self, size: int) -> torch.Tensor:
        """A buffer with a message of `size` bytes, from one or two receives; it may be longer."""
        found, self._posted = self._posted, None
        if found is not None:
            self._finished(found[1])
            if len(found[0]) >= size:
                return found[0]
        whole = self._buffer(size)
        begin = 0
        if found is not None:
            begin = len(found[0])
            whole[:begin].copy_(found[0])
        if begin < size:
            self._finished(self._post(whole[begin:])[1])
        return whole

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._peer.memory)

    def _post(self, buffer: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Await a message in this buffer."""
        try:
            back = self._peer.back
            return buffer, dist.irecv(buffer, group=back, group_src=self._other(back))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _finished(self, work: Any) -> None:
        """Wait until a message has travelled that is on its way."""
        try:
            work.wait(timedelta(seconds=self._left()))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _other(self, group: dist.ProcessGroup) -> int:
        return dist.get_group_rank(group, self._peer.rank)

    def _lost(self, error: RuntimeError) -> Gone:
        return Gone(f"the link to rank {self._peer.rank} broke: {error}")

    def close(self) -> None:
        """Close the socket; the process groups are closed by `LinkGroups`."""
        self._wire.close()
