"""Copies from one device to another, on streams of their own, and threads that go on for others.

Copies are ordered by events, so that neither device computes later because of one: the stream that
computes on the source goes on at once, and that on the target waits for just this copy. (PyTorch's
model-parallel tutorial leaves this as future work.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from penstock.devices.kind import Event, Stream
from penstock.devices.kinds import kind_of
from penstock.devices.layout import alike

_PAGEABLE = 1 << 16  # bytes; of more than these, copies from memory that is not pinned block
_NEVER: Mapping[torch.device, Event] = MappingProxyType({})
_AT_ONCE = 2  # micro-batches whose values are on their way


def on(device: torch.device) -> AbstractContextManager[object]:
    """While open, this is the calling thread's current device, if its kind has one."""
    return kind_of(device).on(device)


class Handover:
    """Orders the work of a thread, the caller, with that of others on the same devices.

    Each thread has current streams of its own, and the caller's may not be the default ones. So the
    work of the others is put after what the caller had on its streams when this was made, and what
    the caller does after `back` is put after the work of the others.

    Args:
        devices: the devices with streams that any of the threads works on.

    Attributes:
        before: of every device, when what the caller had on its stream is done.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.before = dict(_recorded(devices))
        self._after: list[tuple[torch.device, Event]] = []
        self._streams: dict[torch.device, Stream] = {}  # of the others

    @contextmanager
    def taken(self, *devices: torch.device, beside: Sequence[Stream] = ()) -> Iterator[None]:
        """While open, another thread works on these devices.

        Args:
            devices: whose current streams it uses.
            beside: streams that it uses besides.
        """
        _await(self.before.items())
        for stream in beside:
            stream.wait_event(self.before[stream.device])
        used = [device for device in devices if device in self._devices]
        self._streams |= {each: kind_of(each).current_stream(each) for each in used}
        try:
            yield
        finally:
            self._after += _recorded(used)
            self._after += [(stream.device, stream.record_event()) for stream in beside]

    def back(self, made: Callable[[], Sequence[Any]] = tuple) -> None:
        """The caller goes on; nobody else works any more.

        Args:
            made: returns the values that the caller gets from the other threads. Called only if
                these have used other streams; values other than tensors are ignored.
        """
        _await(self._after)
        for device, event in self._after:  # a pass that failed may have left work beside
            if device in self._streams:
                self._streams[device].wait_event(event)
        own = {device: kind_of(device).current_stream(device) for device in self._streams}
        if own == self._streams:
            return
        for value in made():
            if isinstance(value, torch.Tensor) and kind_of(value.device).has_streams:
                kind = kind_of(value.device)
                kind.used_on(kind.current_stream(value.device), value)


class Currents:
    """The calling thread's current device and current streams, for another thread to have them.

    Args:
        devices: whose streams.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = [kind_of(each).current_stream(each) for each in with_streams(devices)]
        self._device: torch.device | None = None
        if self._streams:
            type = self._streams[0].device.type
            self._device = kind_of(type).current_stream(torch.device(type)).device

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While open, they are the other thread's."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(kind_of(stream.device).using(stream))
            if self._device is not None:  # using a stream makes its device the current one
                stack.enter_context(on(self._device))
            yield


def with_streams(devices: Iterable[torch.device]) -> list[torch.device]:
    """Those of these devices that have streams, each once."""
    return [device for device in dict.fromkeys(devices) if kind_of(device).has_streams]


def _recorded(devices: Sequence[torch.device]) -> list[tuple[torch.device, Event]]:
    """For each of these devices an event on the calling thread's current stream."""
    return [(each, kind_of(each).current_stream(each).record_event()) for each in devices]


def _await(events: Iterable[tuple[torch.device, Event]]) -> None:
    for device, event in events:
        kind_of(device).current_stream(device).wait_event(event)


class Copies:
    """Copies tensors from one device to another.

    Copies have a stream of their own on each device that has streams. PyTorch runs a copy on the
    source's current stream, and lets this stream and the target's current stream wait for each
    other. If the target's were the stream that computes there, every copy would hold it up.

    Args:
        source: the device of the tensors.
        target: the device of the copies; if it is the same one, they are copied there.
        sparse: whether copies keep strides that span many more elements than there are.
    """

    def __init__(self, source: torch.device, target: torch.device, sparse: bool = False) -> None:
        self._source, self._target, self._sparse = source, target, sparse
        self._from, self._to = kind_of(source), kind_of(target)
        self._reads = self._from.new_stream(source) if self._from.has_streams else None
        self._writes = self._to.new_stream(target) if self._to.has_streams else None
        self._last: Event | None = None

    def start(
        self, values: Sequence[Any], made: Event | None = None, read: Event | None = None
    ) -> tuple[Sequence[Any], Event | None]:
        """Start to copy every tensor among these values, in the sender's thread.

        Args:
            values: tensors of the source, and others.
            made: when they are there; by default when the current stream has come this far.
            read: is recorded when they have been read.

        Returns:
            the copies, without history but still asking for a gradient where the original does, and
            the event of their arrival; `None` if they are there.
        """
        copies, arrival = self._started(values, made)
        if self._reads is not None:
            used_on(self._reads, values)  # not to be reused before they are copied
            self._last = arrival
            if read is not None:
                self._reads.record_event(read)
        return copies, arrival

    def begin(self, values: Sequence[Any]) -> tuple[Sequence[Any], Event]:
        """Start to copy as `start` does, between two devices with streams, for a sender who waits.

        The values must be kept until `wait_before_reuse`, and the copies as well. Then their memory
        is free for what comes on the streams on which it was allocated. With `start`, it is free
        when the process notices that the device is done: one that is ahead of its devices takes
        more memory meanwhile.

        Returns:
            the copies, and the event of their arrival.
        """
        copies, arrival = self._started(values)
        if arrival is None:
            raise TypeError(f"no streams on {self._source} and {self._target}")
        return copies, arrival

    def wait_before_reuse(self, arrival: Event, read: Event) -> None:
        """Let what follows wait until others are done with memory, in the sender's thread.

        Args:
            arrival: of copies: what follows may write to the values.
            read: when the copies were read: what is copied next may write to them.
        """
        self._from.current_stream(self._source).wait_event(arrival)
        if self._writes is not None:
            self._writes.wait_event(read)

    def _started(
        self, values: Sequence[Any], made: Event | None = None
    ) -> tuple[Sequence[Any], Event | None]:
        stream = self._reads or self._writes
        if stream is None:
            return [self._copy(value) for value in values], None
        if self._reads is not None:
            self._reads.wait_event(made or self._from.current_stream(self._source).record_event())
        with ExitStack() as streams:
            if self._writes is not None:
                streams.enter_context(self._to.using(self._writes))
            if self._reads is not None:
                streams.enter_context(self._from.using(self._reads))
            copies = [self._copy(value) for value in values]
        return copies, stream.record_event()

    def wait(self, copies: Sequence[Any], arrival: Event | None) -> None:
        """Let what follows in the receiver's thread wait until the copies have arrived."""
        if arrival is None:
            return
        if self._writes is None:
            arrival.synchronize()
            return
        compute = self._to.current_stream(self._target)
        compute.wait_event(arrival)
        used_on(compute, copies)

    def wait_for_copies(self) -> None:
        """Let what follows in the sender's thread wait until everything has been copied.

        What was copied may be written then. While a pass runs, nobody writes it.
        """
        last, self._last = self._last, None
        if last is not None:
            self._from.current_stream(self._source).wait_event(last)

    @torch.no_grad()
    def into(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], made: Event) -> None:
        """Copy into existing tensors of the target, in the receiver's thread.

        The target's current stream waits for the copies; `wait_for_copies` lets the source's wait.

        Args:
            pairs: each a tensor on the target, and the tensor on the source that it is to hold.
            made: when these are there.
        """
        pairs = list(pairs)
        if self._reads is None or not pairs:
            for there, here in pairs:
                there.data.copy_(here)
            return
        self._reads.wait_event(made)
        with self._from.using(self._reads):
            for there, here in pairs:
                there.data.copy_(here, non_blocking=True)
        self._last = self._reads.record_event()

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = alike(value, self._moved, self._sparse, to=self._target)
        return copy.requires_grad_(value.requires_grad)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        if self._reads is None and self._writes is not None and value.nbytes >= _PAGEABLE:
            is_plain = value.layout is torch.strided and not self._to.is_pinned(value)
            value = self._to.pinned(value) if is_plain else value
        return value.to(self._target, non_blocking=True, copy=True)


class Ahead:
    """Values of micro-batches that a worker needs on its device, copied before it needs them.

    Each has an event of its own, so that what is computed with one waits for that one alone. The
    next two are under way meanwhile, so that few of them take memory there.

    Args:
        device: the worker's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[torch.device, Copies] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.begin({})

    def begin(
        self, values: Mapping[int, Sequence[Any]], made: Mapping[torch.device, Event] = _NEVER
    ) -> None:
        """Begin a pass. Micro-batches whose values are all on the device are left out of this.

        Args:
            values: of micro-batches, by number, in the order in which they are needed.
            made: when the values on a device are there; by default when its current stream has come
                as far as it has when a copy begins. Other threads may have put work on it by then.
        """
        self._made = made
        self._left: deque[tuple[int, Sequence[Any]]] = deque(
            [item for item in values.items() if not self._are_here(item[1])]
        )
        self._started: dict[int, _Started] = {}
        self._reading: list[Event] = []
        if self._left:
            self._go_on()

    def __contains__(self, number: int) -> bool:
        if not self._started:  # nothing is left either, then
            return False
        return number in self._started or any(number == other for other, _ in self._left)

    def take(self, number: int) -> Sequence[Any]:
        """The values of a micro-batch, for what follows on the current stream."""
        while number not in self._started:
            self._start(*self._left.popleft())
        values, waits = self._started.pop(number)
        self._go_on()
        for copies, made, arrival in waits:
            copies.wait(made, arrival)
        return values

    def wait_for_copies(self) -> None:
        """Wait until all copies from pinned memory are done.

        Nothing else waits for them at the end of a pass, when the script may write to that memory.
        """
        for arrival in self._reading:
            arrival.synchronize()
        self._reading.clear()

    def _are_here(self, values: Sequence[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor) and value.device != self._device:
                return False
        return True

    def _go_on(self) -> None:
        while self._left and len(self._started) < _AT_ONCE:
            self._start(*self._left.popleft())

    def _start(self, number: int, values: Sequence[Any]) -> None:
        values, waits = list(values), []
        others = (v.device for v in values if isinstance(v, torch.Tensor))
        for source in dict.fromkeys(device for device in others if device != self._device):
            if source not in self._copies:
                self._copies[source] = Copies(source, self._device)
            copies = self._copies[source]
            places = [
                k
                for k, v in enumerate(values)
                if isinstance(v, torch.Tensor) and v.device == source
            ]
            own = [values[k] for k in places]
            copied, arrival = copies.start(own, self._made.get(source))
            for k, copy in zip(places, copied, strict=True):
                values[k] = copy
            waits.append(_Wait(copies, copied, arrival))
            is_read = source.type == "cpu" and any(map(kind_of(self._device).is_pinned, own))
            if arrival is not None and is_read:
                self._reading.append(arrival)
        self._started[number] = _Started(values, waits)


class _Wait(NamedTuple):
    """A copy that is to be waited for."""

    copies: Copies
    made: Sequence[Any]
    arrival: Event | None


class _Started(NamedTuple):
    """The values of a micro-batch, on their way."""

    values: Sequence[Any]
    waits: Sequence[_Wait]


def used_on(stream: Stream, values: Sequence[Any]) -> None:
    """Keep the memory of these tensors from being reused before the stream has come this far."""
    for value in values:
        if isinstance(value, torch.Tensor):
            kind = kind_of(value.device)
            if kind.has_streams:
                kind.used_on(stream, value)
