"""PyTorch's race detector for CUDA, which runs on any machine.

It is told of kernels, events and memory by the simulated machine instead of CUDA, and finds two
accesses to the same memory that nothing orders, whether or not they went wrong this time.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from unittest import mock

from torch.cuda._sanitizer import EventHandler, SynchronizationError

from tests.support.simulated.machine import Observer, Stream, Ticket

_HOST, _ALLOCATOR = -1, -2  # streams that the machine does not have


def _no_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    yield from ()


@contextmanager
def without_stacks() -> Iterator[None]:
    """While open, races do not say in which lines of Python they are, which takes long."""
    traces = SimpleNamespace(StackSummary=traceback.StackSummary, walk_stack=_no_frames)
    with mock.patch("torch.cuda._sanitizer.traceback", traces):
        yield


class Detector(Observer):
    """Collects the races of a machine.

    Attributes:
        races: what was found.
    """

    def __init__(self) -> None:
        self._handler = EventHandler()
        self._events: dict[Ticket, int] = {}
        self.races: list[SynchronizationError] = []

    def kernel(
        self, stream: Stream, name: str, reads: Collection[int], writes: Collection[int]
    ) -> None:
        self._access(stream.number, name, set(reads), set(writes))

    def host_reads(self, block: int) -> None:
        """After all that was waited for, and before all that follows."""
        self._begin(_HOST)
        self._access(_HOST, "read", {block}, set())
        self._handler._handle_stream_synchronization(_HOST)

    def record(self, stream: Stream, ticket: Ticket) -> None:
        event = self._events[ticket] = len(self._events)
        self._handler._handle_event_creation(event)
        self._handler._handle_event_record(event, stream.number)

    def wait(self, stream: Stream, ticket: Ticket) -> None:
        self._handler._handle_event_wait(self._events[ticket], stream.number)

    def synchronize(self, ticket: Ticket) -> None:
        self._handler._handle_event_synchronization(self._events[ticket])

    def allocate(self, block: int) -> None:
        self._handler._handle_memory_allocation(block)

    def free(self, block: int, after: Collection[Ticket]) -> None:
        """As if it were written then: nobody may use it any more who was not waited for."""
        self._begin(_ALLOCATOR)
        for ticket in after:
            self._handler._handle_event_wait(self._events[ticket], _ALLOCATOR)
        self._access(_ALLOCATOR, "free", set(), {block})
        self._handler._handle_memory_deallocation(block)

    def _begin(self, stream: int) -> None:
        """Let what is not on any stream of the machine come after all that was waited for."""
        syncs = self._handler.syncs
        syncs.current_sync_states[stream] = syncs.host_sync_state.copy()

    def _access(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        aliases: dict[int, list[str]] = {block: [] for block in reads | writes}
        self.races += self._handler._handle_kernel_launch(
            stream, reads, writes, set(), name, aliases
        )
