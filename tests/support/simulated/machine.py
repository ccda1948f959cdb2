"""Streams, events and memory of simulated devices."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

POISON = 0xFF
"""Every byte of memory that nobody owns: no number as a float, -1 as an integer."""


class DeviceFault(RuntimeError):  # noqa: N818 - as devices call it
    """What a device would report as an error: an access to memory that is not its own."""


class Ticket:
    """One recording of an event.

    Attributes:
        is_done: whether the stream has come this far.
        seconds: when it did.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.seconds = 0.0


class Kernel(NamedTuple):
    """Some work of a stream.

    Attributes:
        name: the operator's.
        run: does it.
    """

    name: str
    run: Callable[[], None]


class Record(NamedTuple):
    """The stream has come this far."""

    ticket: Ticket


class Wait(NamedTuple):
    """The stream goes on when another one has come that far."""

    ticket: Ticket


class Event:
    """A point in a stream."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.ticket: Ticket | None = None

    def record(self, stream: Stream) -> None:
        """From now on it is behind what is on the stream now."""
        self.ticket = self._machine.record(stream)

    def synchronize(self) -> None:
        """Run the machine until the stream has come this far."""
        if self.ticket is not None:
            self._machine.run_until_done(self.ticket)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds on the clocks of streams; both have come."""
        tickets = [event.ticket for event in (self, other) if event.ticket is not None]
        if len(tickets) < 2 or not all(ticket.is_done for ticket in tickets):
            raise DeviceFault("an event has not come, so it has no time")
        return 1000 * (tickets[1].seconds - tickets[0].seconds)

    def query(self) -> bool:
        """Whether it has."""
        return self.ticket is None or self.ticket.is_done


class Stream:
    """A device's queue of work.

    Attributes:
        device: whose.
        number: of all streams of the machine, from 1.
        queue: what it has not done yet.
        weight: how probably it is the next one to go on.
        clock: the seconds at which it has done what it has done so far.
    """

    def __init__(self, machine: Machine, device: torch.device, number: int, weight: float) -> None:
        self._machine = machine
        self.device, self.number, self.weight = device, number, weight
        self.queue: deque[Kernel | Record | Wait] = deque()
        self.clock = 0.0

    def __repr__(self) -> str:
        return f"<stream {self.number} of {self.device}>"

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind everything that is on the stream now."""
        event = event or Event(self._machine)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What comes from now on waits for the event."""
        if event.ticket is not None:
            self._machine.wait(self, event.ticket)

    def wait_stream(self, other: Stream) -> None:
        """What comes from now on waits for what is on the other stream now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Run the machine until the stream has done all that is on it now."""
        self.record_event().synchronize()

    def is_ready(self) -> bool:
        """Whether it can go on."""
        head = self.queue[0] if self.queue else None
        return head is not None and (not isinstance(head, Wait) or head.ticket.is_done)


@dataclass(eq=False)
class Block:
    """Some memory of a device.

    Attributes:
        number: another one each time that it is given out.
        stream: on which it was allocated.
        memory: its bytes.
        users: other streams that use it.
    """

    number: int
    stream: Stream
    memory: torch.UntypedStorage
    users: set[Stream] = field(default_factory=set)


class Handle:
    """Who owns a block; the block is free when nobody has the handle any more."""

    def __init__(self, block: Block, freed: deque[Block]) -> None:
        self.block = block
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.block)  # in whatever thread, in the midst of anything


class Observer:
    """What wants to know of everything that happens, in the order in which it is given."""

    def kernel(
        self, stream: Stream, name: str, reads: Collection[int], writes: Collection[int]
    ) -> None:
        """Work on blocks, by their numbers."""

    def host_reads(self, block: int) -> None:
        """The thread that gives work reads a block."""

    def record(self, stream: Stream, ticket: Ticket) -> None:
        """An event is recorded."""

    def wait(self, stream: Stream, ticket: Ticket) -> None:
        """A stream waits for an event."""

    def synchronize(self, ticket: Ticket) -> None:
        """The thread that gives work has waited for an event."""

    def allocate(self, block: int) -> None:
        """A block is given out."""

    def free(self, block: int, after: Collection[Ticket]) -> None:
        """It is taken back, as these events of all streams that should use it have come."""


class Machine:
    """Devices with streams and memory, whose work is done late, in an order that a seed decides.

    Args:
        count: how many devices.
        seed: of the order.
        is_late: whether work waits; else everything is done as soon as it is given.
        observer: told of everything.
        seconds: how long work takes, by its name; giving it takes no time. The order in which work
            is done has no influence on the clocks of streams.

    Attributes:
        devices: `sim:0`, `sim:1`, and so on.
        streams: all of them, by their numbers less one.
        defaults: of every device the stream that threads use unless they say otherwise.
        order: the work that was done, each with the number of its stream.
        allocated: bytes of every device.
        peak: the most that there were.
    """

    def __init__(
        self,
        count: int = 2,
        seed: int = 0,
        is_late: bool = True,
        observer: Observer | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._seconds = dict(seconds or {})
        self._random = random.Random(seed)
        self._eagerness = self._random.choice([0.0, 0.02, 0.3]) if is_late else 1.0
        self._is_late = is_late
        self._lock = threading.RLock()
        self._observer = observer or Observer()
        self.devices = [torch.device("sim", index) for index in range(count)]
        self.streams: list[Stream] = []
        self.order: list[tuple[int, str]] = []
        self._freed: deque[Block] = deque()
        self._lent: list[tuple[Block, list[Ticket]]] = []  # free but for their users
        self._pools: dict[tuple[Stream, int], list[Block]] = {}
        self._blocks = 0
        self.allocated = [0] * count
        self.peak = [0] * count
        self.defaults = [self.new_stream(device) for device in self.devices]

    def new_stream(self, device: torch.device) -> Stream:
        """One more stream."""
        with self._lock:
            weight = self._random.choice([0.01, 1.0, 100.0])
            stream = Stream(self, device, len(self.streams) + 1, weight)
            self.streams.append(stream)
            return stream

    def close(self) -> None:
        """Drop what is not done, and what is free.

        Work has its operands, these have memory, and that has its stream, whose work it is: a
        circle of which Python does not see all, so it would stay.
        """
        with self._lock:
            for stream in self.streams:
                stream.queue.clear()
            self._freed.clear()
            self._lent.clear()
            self._pools.clear()

    # -- giving work --------------------------------------------------------------------------

    def launch(
        self,
        stream: Stream,
        name: str,
        run: Callable[[], None],
        reads: Collection[Block],
        writes: Collection[Block],
    ) -> None:
        """Put work on a stream."""
        with self._lock:
            self._collect()
            numbers = {block.number for block in writes}
            self._observer.kernel(stream, name, {b.number for b in reads} - numbers, numbers)
            stream.queue.append(Kernel(name, run))
            self._go_on()

    def record(self, stream: Stream) -> Ticket:
        """Put an event on a stream."""
        with self._lock:
            self._collect()
            ticket = self._recorded(stream)
            self._go_on()
            return ticket

    def wait(self, stream: Stream, ticket: Ticket) -> None:
        """Let a stream wait for an event."""
        with self._lock:
            self._collect()
            self._observer.wait(stream, ticket)
            stream.queue.append(Wait(ticket))
            self._go_on()

    def host_reads(self, block: Block) -> None:
        """The thread that gives work reads a block."""
        with self._lock:
            self._observer.host_reads(block.number)

    def _recorded(self, stream: Stream) -> Ticket:
        ticket = Ticket()
        self._observer.record(stream, ticket)
        stream.queue.append(Record(ticket))
        return ticket

    # -- doing it -----------------------------------------------------------------------------

    def run_until_done(self, ticket: Ticket) -> None:
        """Go on in any order until the event has come; later work may be done as well."""
        with self._lock:
            while not ticket.is_done:
                self._step()
            self._observer.synchronize(ticket)

    def run_all(self) -> None:
        """Go on in any order until nothing is left."""
        for stream in list(self.streams):
            stream.synchronize()

    def _go_on(self) -> None:
        """Do some of what is there, or all of it if nothing is to be late."""
        while self._random.random() < self._eagerness and any(s.is_ready() for s in self.streams):
            self._step()

    def _step(self) -> None:
        ready = [stream for stream in self.streams if stream.is_ready()]
        if not ready:
            raise DeviceFault(
                f"all streams wait for one another: {[s for s in self.streams if s.queue]}"
            )
        (stream,) = self._random.choices(ready, [each.weight for each in ready])
        work = stream.queue.popleft()
        if isinstance(work, Kernel):
            self.order.append((stream.number, work.name))
            stream.clock += self._seconds.get(work.name, 0.0)
            with undisturbed():
                work.run()
        elif isinstance(work, Record):
            work.ticket.is_done, work.ticket.seconds = True, stream.clock
        else:
            stream.clock = max(stream.clock, work.ticket.seconds)

    # -- memory -------------------------------------------------------------------------------

    def allocate(self, stream: Stream, size: int) -> Handle:
        """Memory for what is on the stream from now on: that of somebody else, where possible."""
        with self._lock:
            self._collect()
            self._blocks += 1
            pool = self._pools.get((stream, size))
            if pool:
                block = Block(self._blocks, stream, pool.pop().memory)
            else:
                block = Block(self._blocks, stream, torch.UntypedStorage(size))
                _poison(block.memory)
            self._observer.allocate(block.number)
            index = self.devices.index(stream.device)
            self.allocated[index] += size
            self.peak[index] = max(self.peak[index], self.allocated[index])
            return Handle(block, self._freed)

    def used_on(self, block: Block, stream: Stream) -> None:
        """What `Tensor.record_stream` says."""
        if stream is not block.stream:
            with self._lock:
                block.users.add(stream)

    def _collect(self) -> None:
        """Take back what nobody owns; what other streams use, when they have come so far."""
        while self._freed:
            block = self._freed.popleft()
            self.allocated[self.devices.index(block.stream.device)] -= block.memory.nbytes()
            tickets = []
            for stream in sorted(block.users, key=lambda user: user.number):
                tickets.append(self._recorded(stream))
            self._lent.append((block, tickets))
        lent, self._lent = self._lent, []
        for block, tickets in lent:
            if all(ticket.is_done for ticket in tickets):
                self._take_back(block, tickets)
            else:
                self._lent.append((block, tickets))

    def _take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """Its own stream may have it again at once; whoever reads it later reads no numbers."""
        memory, stream = block.memory, block.stream
        self._observer.free(block.number, [*tickets, self._recorded(stream)])
        stream.queue.append(Kernel("free", lambda: _poison(memory)))
        self._pools.setdefault((stream, memory.nbytes()), []).append(block)


def _poison(memory: torch.UntypedStorage) -> None:
    if memory.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(memory).fill_(POISON)


@contextmanager
def undisturbed() -> Iterator[None]:
    """While open, what the calling thread is in the midst of has no influence on operators."""
    disabled: Any = torch._C
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        disabled._DisableAutocast(),
        disabled.DisableTorchFunction(),
    ):
        yield
