"""PyTorch's race detector for CUDA, which runs on any machine.

It is told of kernels, events and memory by the simulated machine instead of CUDA, and finds two
accesses to the same memory that nothing orders, whether or not they went wrong this time.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from torch.cuda._sanitizer import EventHandler, SynchronizationError

from tests.support.simulated.machine import Observer, Stream, Ticket


class Detector(Observer):
    """Collects the races of a machine.

    Attributes:
        races: what was found.
    """

    def __init__(self) -> None:
        self._handler = EventHandler()
        self._events: dict[Ticket, int] = {}
        self._others = count(-1, -1)  # numbers of streams that the machine does not have
        self.races: list[SynchronizationError] = []

    def kernel(
        self, stream: Stream, name: str, reads: Collection[int], writes: Collection[int]
    ) -> None:
        self._access(stream.number, name, set(reads), set(writes))

    def host_reads(self, block: int) -> None:
        """After all that was waited for, and before all that follows."""
        number = self._aside()
        self._access(number, "read", {block}, set())
        self._handler._handle_stream_synchronization(number)

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
        number = self._aside()
        for ticket in after:
            self._handler._handle_event_wait(self._events[ticket], number)
        self._access(number, "free", set(), {block})
        self._handler._handle_memory_deallocation(block)

    def _aside(self) -> int:
        """A new stream, for what is not on any, which comes after all that was waited for."""
        number = next(self._others)
        self._handler._handle_stream_creation(number)
        return number

    def _access(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        aliases: dict[int, list[str]] = {block: [] for block in reads | writes}
        self.races += self._handler._handle_kernel_launch(
            stream, reads, writes, set(), name, aliases
        )
