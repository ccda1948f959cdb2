"""Accelerators: everything that PyTorch offers for all of them in the same way.

PyTorch has a module for each kind, `torch.cuda`, `torch.xpu` or that of a package which brings a
backend of its own, and all of them have the same functions. `torch.accelerator` and `torch.Stream`
are the same for the one kind that the process has; they are used where they suffice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from penstock.devices.kind import DeviceKind, DeviceMemory, Moment, Stream

_NEEDED = ("Event", "Stream", "current_stream", "device", "device_count", "stream", "synchronize")

# While a tool traces GPUs, such as PyTorch's race detector, PyTorch calls Python as it makes a
# device's first streams, and another thread that makes one waits for that with Python locked.
MAKING_STREAMS = threading.RLock()


class Accelerator(DeviceKind):
    """A kind of device that does its work later, in streams.

    Args:
        type: what PyTorch calls it.
    """

    has_streams = True

    def __init__(self, type: str) -> None:
        self.type = type

    @property
    def _module(self) -> Any:
        """PyTorch's module of this kind."""
        return torch.get_device_module(self.type)

    def is_complete(self) -> bool:
        """Whether PyTorch has everything that is needed for this kind; streams, above all."""
        module = getattr(torch, self.type, None)
        return all(hasattr(module, name) for name in _NEEDED)

    def count(self) -> int:
        """How many this process may use; 0 if there is no driver, or this build knows none."""
        module = getattr(torch, self.type, None)
        return 0 if module is None else int(module.device_count())

    def name(self, device: torch.device) -> str:
        """As the driver says; the kind's name if it says nothing."""
        found = getattr(self._module, "get_device_name", None)
        return str(found(device)) if found else self.type

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """While open, this is the calling thread's current device."""
        return cast("AbstractContextManager[object]", self._module.device(device))

    def new_stream(self, device: torch.device) -> Stream:
        """Another stream than the current one."""
        with MAKING_STREAMS:
            return cast(Stream, self._module.Stream(device))

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's."""
        return cast(Stream, self._module.current_stream(device))

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """While open, the calling thread's work on the stream's device goes there."""
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def moment(self, device: torch.device) -> Moment:
        """An event of this kind, on the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(device))
        return cast(Moment, event)

    def used_on(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory until the stream has done what is there now."""
        tensor.record_stream(cast(torch.Stream, stream))

    def synchronize(self, device: torch.device) -> None:
        """Wait for all streams of the device."""
        self._module.synchronize(device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in memory that the device can copy from by itself."""
        return tensor.is_pinned()

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """By PyTorch's allocator, which keeps the memory until the copy of it is done."""
        return tensor.pin_memory()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """What is free and what there is, by the driver; `None` if it does not say."""
        found = getattr(self._module, "mem_get_info", None)
        return None if found is None else DeviceMemory(*map(int, found(device)))

    def allocated(self, device: torch.device) -> tuple[int, int]:
        """By PyTorch's caching allocator."""
        module = self._module
        if not hasattr(module, "memory_allocated"):
            return 0, 0
        return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))

    def generator(self, device: torch.device) -> torch.Generator:
        """The device's own; without a number, that of the current device."""
        module = self._module
        index = module.current_device() if device.index is None else device.index
        return cast(torch.Generator, module.default_generators[index])

    def random_states(self) -> list[torch.Tensor]:
        """Nothing is started for it: devices that were never used have drawn nothing."""
        module = self._module
        was_used = getattr(module, "is_initialized", module.is_available)()
        return list(module.get_rng_state_all()) if was_used else []

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Those of devices that are not here are left out."""
        for index, state in enumerate(states[: self.count()]):
            self._module.set_rng_state(state, index)
