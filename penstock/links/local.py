"""The link between two thread workers: a queue of references, or of copies on another device."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from penstock.devices.streams import Copies
from penstock.links.link import Gradients, Roots, Values, edges


class Aborted(Exception):  # noqa: N818 - never reaches a user: another worker's error does
    """The step was given up while this worker waited."""


_ABORT: Any = object()


class LocalLink:
    """Carries values from one stage to the next, and their gradients back, in order.

    The link is the sink of the earlier stage and the source of the later one.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._forward = _Channel(source, target)
        self._backward = _Channel(target, source)

    def send(self, microbatch: int, results: Values) -> Roots:
        """Hand over a micro-batch's values."""
        self._forward.put(results)
        return edges(results)

    def receive(self, microbatch: int) -> Values:
        """The next micro-batch's values; waits for them.

        Raises:
            Aborted: `abort` was called.
        """
        return tuple(self._forward.get())

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Hand back the gradients of a micro-batch's values."""
        self._backward.put(gradients)

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The next micro-batch's gradients; waits for them.

        Raises:
            Aborted: `abort` was called.
        """
        return self._backward.get()

    def wait_for_copies(self, results: bool) -> None:
        """Let what the calling worker does next wait until what it has sent is copied.

        Args:
            results: whether it has sent those of the earlier stage, or else gradients.
        """
        (self._forward if results else self._backward).wait_for_copies()

    def abort(self) -> None:
        """Wake whoever waits here, now and until `reset`."""
        self._forward.abort()
        self._backward.abort()

    def reset(self) -> None:
        """Throw away whatever is under way. Nobody may be waiting."""
        self._forward.reset()
        self._backward.reset()


class _Channel:
    """One direction of a link."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._copies = Copies(source, target) if source != target else None
        self.reset()

    def reset(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def abort(self) -> None:
        self._queue.put(_ABORT)

    def put(self, values: Sequence[Any]) -> None:
        self._queue.put(self._copies.start(values) if self._copies else (values, None))

    def wait_for_copies(self) -> None:
        if self._copies:
            self._copies.wait_for_copies()

    def get(self) -> Sequence[Any]:
        item = self._queue.get()
        if item is _ABORT:
            self._queue.put(_ABORT)  # it stays aborted for the next one
            raise Aborted
        values, arrival = item
        if self._copies:
            self._copies.wait(values, arrival)
        return values  # type: ignore[no-any-return]
