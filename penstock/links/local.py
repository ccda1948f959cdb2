"""The link between two thread workers: a queue that hands over references.

On one device a value is handed over as it is. Between CUDA devices it is copied on a stream of
its own, ordered by events, so that neither device computes later because of it: the sender's
stream goes on at once, and the receiver's waits for just this copy. (PyTorch's model-parallel
tutorial leaves this as future work.)
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

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
        self._copies = source != target
        self._source = source
        self._target = target
        self._stream = _copy_stream(source, target)
        self.reset()

    def reset(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def abort(self) -> None:
        self._queue.put(_ABORT)

    def put(self, values: Sequence[Any]) -> None:
        self._queue.put(self._copy(values) if self._copies else (values, None))

    def get(self) -> Sequence[Any]:
        item = self._queue.get()
        if item is _ABORT:
            self._queue.put(_ABORT)  # it stays aborted for the next one
            raise Aborted
        values, ready = item
        if ready is not None:
            self._await(values, ready)
        return values  # type: ignore[no-any-return]

    def _copy(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Start copying every tensor; the event says when they have arrived."""
        if self._stream is None:
            return [_to(v, self._target) for v in values], None
        device = self._stream.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copies = [_to(v, self._target) for v in values]
            ready = torch.cuda.Event()
            ready.record(self._stream)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(self._stream)  # not to be reused before it is copied
        return copies, ready

    def _await(self, values: Sequence[Any], ready: Any) -> None:
        if self._target.type != "cuda":
            ready.synchronize()
            return
        compute = torch.cuda.current_stream(self._target)
        compute.wait_event(ready)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(compute)


def _copy_stream(source: torch.device, target: torch.device) -> torch.cuda.Stream | None:
    """A stream for the copies, on the CUDA device that they leave or else reach."""
    if source == target or "cuda" not in (source.type, target.type):
        return None
    return torch.cuda.Stream(source if source.type == "cuda" else target)


def _to(value: Any, device: torch.device) -> Any:
    """The value on `device`, without history but still asking for a gradient if it did."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().to(device, non_blocking=True)
    return copy.requires_grad_(value.requires_grad)
