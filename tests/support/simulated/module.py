"""`torch.sim`: what PyTorch has for every kind of accelerator."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from penstock.devices.accelerator import Accelerator
from tests.support.simulated.machine import Event as MachineEvent
from tests.support.simulated.machine import Machine, Stream
from tests.support.simulated.tensors import RUNNING, empty, is_pinned, pinned


class Module(types.ModuleType):
    """The module. There are devices only while a machine runs."""

    def is_available(self) -> bool:
        return RUNNING.machine is not None

    is_initialized = is_available

    def device_count(self) -> int:
        return len(RUNNING.machine.devices) if RUNNING.machine else 0

    def get_device_name(self, device: Any = None) -> str:
        return "simulated device"

    def current_device(self) -> int:
        return RUNNING.current.device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Backwards run in the thread that calls them: autograd has no threads for these."""
        before = RUNNING.current.device
        RUNNING.current.device = torch.device(device).index or 0
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            RUNNING.current.device = before

    # -- streams ------------------------------------------------------------------------------

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802
        return RUNNING.here.new_stream(self._numbered(device))

    def Event(self, enable_timing: bool = False) -> MachineEvent:  # noqa: N802
        return MachineEvent(RUNNING.here)

    def current_stream(self, device: Any = None) -> Stream:
        return RUNNING.stream(self._numbered(device))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        streams = RUNNING.current.streams
        before = streams.get(stream.device)
        streams[stream.device] = stream
        try:
            yield
        finally:
            streams.pop(stream.device)
            if before is not None:
                streams[stream.device] = before

    def synchronize(self, device: Any = None) -> None:
        if RUNNING.machine is None:  # torch.profiler asks, as of every kind of device
            return
        for stream in list(RUNNING.here.streams):
            if stream.device == self._numbered(device):
                stream.synchronize()

    # -- memory -------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        return RUNNING.here.allocated[self._numbered(device).index]

    def max_memory_allocated(self, device: Any = None) -> int:
        return RUNNING.here.peak[self._numbered(device).index]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return (1 << 34) - self.memory_allocated(device), 1 << 34

    # -- random numbers: those of the CPU -----------------------------------------------------

    @property
    def default_generators(self) -> Sequence[torch.Generator]:
        return [torch.default_generator] * self.device_count()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        torch.default_generator.set_state(state)

    # -- what PyTorch itself asks for ---------------------------------------------------------

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its numbers are those of the CPU."""

    def _numbered(self, device: Any) -> torch.device:
        if device is None:
            return RUNNING.here.devices[RUNNING.current.device]
        index = device if isinstance(device, int) else torch.device(device).index or 0
        return RUNNING.here.devices[index]


@cache
def install() -> None:
    """Make `sim` a kind of device, for the rest of the process. There is none before `simulated`.

    PyTorch lets packages name one kind of their own, and bring its kernels in Python. With one,
    autograd does not find the streams of GPUs, so a test is skipped where there are some.
    """
    if torch.cuda.is_available():
        why = "devices are simulated where there are no GPUs: CUDA_VISIBLE_DEVICES= hides them"
        pytest.skip(why, allow_module_level=True)
    torch.ones(1, requires_grad=True).backward()  # now autograd has its threads, none for `sim`,
    # which a fork would not have, and would not work without
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", Module("torch.sim"))
    accelerators: Any = torch._C._acc

    class Guard(accelerators.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    class Hooks(accelerators.PrivateUse1Hooks):  # type: ignore[misc]
        def is_built(self) -> bool:
            return True

        def is_available(self) -> bool:
            return RUNNING.machine is not None

        def has_primary_context(self, index: int) -> bool:
            return RUNNING.machine is not None

    accelerators.register_python_privateuseone_hook(Hooks())
    accelerators.register_python_privateuseone_device_guard(Guard())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _KEPT.append(library)


_KEPT: list[Any] = []


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return empty(size, stride, dtype or torch.get_default_dtype(), device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return empty(size, stride, dtype or torch.get_default_dtype(), device)


def _is_pinned(self: Accelerator, tensor: torch.Tensor) -> bool:
    return is_pinned(tensor)


def _pinned(self: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch's own needs an allocator in C++."""
    return pinned(tensor)


@contextmanager
def simulated(machine: Machine | None = None, **options: Any) -> Iterator[Machine]:
    """While open, this machine's devices are there: `sim:0`, `sim:1`, and so on.

    After that the machine is closed.

    Args:
        machine: the machine; one is made of the options, as of `Machine`, if there is none.
    """
    install()
    before, RUNNING.machine = RUNNING.machine, machine or Machine(**options)
    pinning = mock.patch.multiple(Accelerator, is_pinned=_is_pinned, pinned=_pinned)
    try:
        with pinning, torch.autograd.set_multithreading_enabled(False):
            yield RUNNING.machine
    finally:
        RUNNING.machine.close()
        RUNNING.machine = before
