"""Copies from one device to another, on a stream of their own.

They are ordered by events, so that neither device computes later because of a copy: the stream that
computes on the source goes on at once, and that on the target waits for just this copy. (PyTorch's
model-parallel tutorial leaves this as future work.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """While open, this is the calling thread's current device, if its kind has one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Copies:
    """Copies tensors from one device to another.

    Args:
        source: where they are.
        target: where they are wanted, which is another one.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._target = target
        self._stream: torch.cuda.Stream | None = None
        if "cuda" in (source.type, target.type):
            self._stream = torch.cuda.Stream(source if source.type == "cuda" else target)

    def start(self, values: Sequence[Any]) -> tuple[Sequence[Any], torch.cuda.Event | None]:
        """Start to copy every tensor among these values, in the sender's thread.

        Returns:
            the copies, without history but still asking for a gradient where the original does, and
            the event of their arrival; `None` if they are there.
        """
        if self._stream is None:
            return [self._copy(value) for value in values], None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [self._copy(value) for value in values]
            arrival = torch.cuda.Event()
            arrival.record(self._stream)
        _used_on(self._stream, values)  # not to be reused before they are copied
        return copies, arrival

    def wait(self, copies: Sequence[Any], arrival: torch.cuda.Event | None) -> None:
        """Let what follows in the receiver's thread wait until the copies have arrived."""
        if arrival is None:
            return
        if self._target.type != "cuda":
            arrival.synchronize()
            return
        compute = torch.cuda.current_stream(self._target)
        compute.wait_event(arrival)
        _used_on(compute, copies)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach().to(self._target, non_blocking=True)
        return copy.requires_grad_(value.requires_grad)


def _used_on(stream: torch.cuda.Stream, values: Sequence[Any]) -> None:
    """Keep the memory of these tensors from being reused before the stream has come this far."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(stream)
