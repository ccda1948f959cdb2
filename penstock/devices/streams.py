"""Copies from one device to another, on streams of their own, and threads that go on for others.

Copies are ordered by events, so that neither device computes later because of one: the stream that
computes on the source goes on at once, and that on the target waits for just this copy. (PyTorch's
model-parallel tutorial leaves this as future work.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from penstock.devices.kind import Event, Stream
from penstock.devices.kinds import kind_of


def on(device: torch.device) -> AbstractContextManager[object]:
    """While open, this is the calling thread's current device, if its kind has one."""
    return kind_of(device).on(device)


class Handover:
    """Work of one thread, the caller, that others go on with, on the same devices.

    Each has current streams of its own: a user's may be others than the default ones. So what the
    others do comes after what the caller has given to its streams, and what the caller does after
    that comes after them.

    Args:
        devices: all that anybody works on.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._before = _recorded(devices)
        self._after: list[tuple[torch.device, Event]] = []

    @contextmanager
    def taken(self, device: torch.device) -> Iterator[None]:
        """While open, another thread works on a device."""
        _await(self._before)
        try:
            yield
        finally:
            self._after += _recorded([device])

    def back(self, made: Iterable[Any] = ()) -> None:
        """The caller goes on; nobody else works any more.

        Args:
            made: what the caller gets from them; values other than tensors do not count.
        """
        _await(self._after)
        for value in made:
            if isinstance(value, torch.Tensor) and kind_of(value.device).has_streams:
                kind = kind_of(value.device)
                kind.used_on(kind.current_stream(value.device), value)


def _recorded(devices: Iterable[torch.device]) -> list[tuple[torch.device, Event]]:
    """For every device that has streams an event on the calling thread's current one."""
    with_streams = (device for device in dict.fromkeys(devices) if kind_of(device).has_streams)
    return [(each, kind_of(each).current_stream(each).record_event()) for each in with_streams]


def _await(events: Iterable[tuple[torch.device, Event]]) -> None:
    for device, event in events:
        kind_of(device).current_stream(device).wait_event(event)


class Copies:
    """Copies tensors from one device to another.

    A copy has a stream on each device that has streams. PyTorch runs it on the source's and makes
    the target's current stream wait for it, and it for that one; were that the stream that computes
    there, every copy would stop it.

    Args:
        source: where they are.
        target: where they are wanted, which is another one.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._from, self._to = kind_of(source), kind_of(target)
        self._reads = self._from.new_stream(source) if self._from.has_streams else None
        self._writes = self._to.new_stream(target) if self._to.has_streams else None
        self._last: Event | None = None

    def start(self, values: Sequence[Any]) -> tuple[Sequence[Any], Event | None]:
        """Start to copy every tensor among these values, in the sender's thread.

        Returns:
            the copies, without history but still asking for a gradient where the original does, and
            the event of their arrival; `None` if they are there.
        """
        stream = self._reads or self._writes
        if stream is None:
            return [self._copy(value) for value in values], None
        if self._reads is not None:
            self._reads.wait_event(self._from.current_stream(self._source).record_event())
        with ExitStack() as streams:
            if self._writes is not None:
                streams.enter_context(self._to.using(self._writes))
            if self._reads is not None:
                streams.enter_context(self._from.using(self._reads))
            copies = [self._copy(value) for value in values]
        arrival = stream.record_event()
        if self._reads is not None:
            _used_on(self._reads, values)  # not to be reused before they are copied
            self._last = arrival
        return copies, arrival

    def wait(self, copies: Sequence[Any], arrival: Event | None) -> None:
        """Let what follows in the receiver's thread wait until the copies have arrived."""
        if arrival is None:
            return
        if self._writes is None:
            arrival.synchronize()
            return
        compute = self._to.current_stream(self._target)
        compute.wait_event(arrival)
        _used_on(compute, copies)

    def settle(self) -> None:
        """Let what follows in the sender's thread wait until everything has been copied.

        What was copied may be written then. While a pass runs, nobody writes it.
        """
        if self._last is not None:
            self._from.current_stream(self._source).wait_event(self._last)
            self._last = None

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach().to(self._target, non_blocking=True)
        return copy.requires_grad_(value.requires_grad)


def _used_on(stream: Stream, values: Sequence[Any]) -> None:
    """Keep the memory of these tensors from being reused before the stream has come this far."""
    for value in values:
        if isinstance(value, torch.Tensor):
            kind = kind_of(value.device)
            if kind.has_streams:
                kind.used_on(stream, value)
