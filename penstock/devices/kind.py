"""What differs between kinds of device, as one interface.

Everything else in Penstock is written against `DeviceKind` and never asks which one it has:

| | |
|---|---|
| `cpu.py` | CPUs: no streams; whoever gives work waits until it is done |
| `accelerator.py` | what PyTorch calls an accelerator: work is queued on streams and done later |
| `cuda.py` | CUDA: an accelerator, and what only CUDA has |
| `kinds.py` | which kind a device is of, and which accelerator this machine has |

A *stream* is a device's queue of work: what is on it is done in order. Two streams know nothing of
each other until one waits for an *event*, a point in another one. Memory is given out and taken
back when Python says so, not when the work is done: it belongs to the stream on which it was
allocated, which may have it back at once, as it is in order there. Whoever uses it on another
stream has to say so (`used_on`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch


class Event(Protocol):
    """A point in a stream; `torch.Event` is one."""

    def synchronize(self) -> None:
        """Wait here, in this thread, until the stream has come this far."""


class Moment(Event, Protocol):
    """An event that knows when the stream came there; `torch.Event(enable_timing=True)` is one."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from this one to a later one of the same device; both have come."""


class Stream(Protocol):
    """A device's queue of work; `torch.Stream` is one."""

    @property
    def device(self) -> torch.device:
        """The device that runs it."""

    def record_event(self, event: Any = None) -> Event:
        """An event behind everything that is on the stream now: this one, or a new one."""

    def wait_event(self, event: Event) -> None:
        """Let what comes onto the stream from now on wait for the event."""


T = TypeVar("T")


class Recording(Protocol):
    """Work of a device that was recorded, to be given to it again as a whole."""

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Put all of it on the calling thread's current stream.

        Args:
            seeds: of its generators, one each.
        """


class GraphRecorder(Protocol):
    """Records work of a device."""

    def record(
        self,
        work: Callable[[Sequence[AbstractContextManager[None]]], T],
        generators: int = 0,
        after: Recording | None = None,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> tuple[T, Recording]:
        """Record some work without giving it to the device.

        Tensors of the work that still exist afterwards keep their memory: a replay reads and writes
        it. A replay also writes the memory of those that are gone; it is shared only with what is
        recorded with this recording as `after`.

        Args:
            work: the work to record. It is called with one context per generator: while that is
                open, torch functions draw from this generator.
            generators: how many of them `work` is given.
            after: an earlier recording with which memory is shared. Nothing that the new recording
                leaves may be needed once the earlier one is replayed again.
            alone: makes a context that is open while recording begins; while it is open, no other
                thread may draw from the device's generator.

        Returns:
            what `work` returns, whose values come with the first replay, and the recording.

        Raises:
            RuntimeError: something in it cannot be recorded, such as reading a value on the CPU.
        """


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory.

    Attributes:
        free: what nobody uses, on this machine.
        total: all of it.
    """

    free: int
    total: int


class DeviceKind(ABC):
    """One kind of device.

    Attributes:
        type: what PyTorch calls it: `torch.device.type`.
        has_streams: whether work is queued on streams, so that it may be done later. If not, the
            methods about streams must not be called.
        can_record: whether work can be recorded and replayed; if not, `recorder` must not be
            called.
        can_share: whether several processes can have the same memory; if not, `shared`,
            `new_shared_event` and `release_shared` must not be called.
    """

    type: str
    has_streams: bool
    can_record: bool = False
    can_share: bool = False

    def settings(self) -> tuple[str, ...]:
        """The settings of this process that decide which kernels are chosen, as texts."""
        return ()

    def set_settings(self, settings: Sequence[str]) -> None:
        """Apply the settings of another process, as `settings` returned them there."""
        if settings:
            raise TypeError(f"{self.type} devices have no settings of their own")

    @abstractmethod
    def count(self) -> int:
        """How many of them this process may use."""

    @abstractmethod
    def name(self, device: torch.device) -> str:
        """The model of a device, such as `NVIDIA H100`."""

    def devices(self) -> list[torch.device]:
        """Those that this process may use."""
        return [torch.device(self.type, index) for index in range(self.count())]

    # -- streams ------------------------------------------------------------------------------

    @abstractmethod
    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """While open, the calling thread's current device of this kind is this one."""

    @abstractmethod
    def new_stream(self, device: torch.device) -> Stream:
        """One more stream of a device. Kinds have few: some may be one and the same."""

    @abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """The one that the calling thread's work on a device goes to."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """While open, the calling thread's work on the stream's device goes there."""

    @abstractmethod
    def moment(self, device: torch.device) -> Moment:
        """An event with a time, behind all that is on the calling thread's current stream now."""

    @abstractmethod
    def used_on(self, stream: Stream, tensor: torch.Tensor) -> None:
        """A tensor that was made on another stream is used on this one, by what is there now.

        Its memory is not given to anybody else before that is done.
        """

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait here, in this thread, until a device has done all that it was given."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the CPU is in memory that these devices read by themselves.

        Then a copy of it may be under way when it has been given.
        """

    @abstractmethod
    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the CPU in such memory."""

    def recorder(self, device: torch.device) -> GraphRecorder:
        """Records work of a device."""
        raise TypeError(f"work of {self.type} devices cannot be recorded")

    # -- memory -------------------------------------------------------------------------------

    @abstractmethod
    def memory(self, device: torch.device) -> DeviceMemory | None:
        """What a device has; `None` if it has no memory of its own, or does not tell."""

    @abstractmethod
    def allocated(self, device: torch.device) -> tuple[int, int]:
        """Bytes that PyTorch has allocated there in this process, and the most it had.

        Both are 0 where that is not counted.
        """

    def shared(self, tensor: torch.Tensor) -> Any:
        """An object that is unpickled, once, as a tensor in the same memory, in another process.

        The memory stays as long as either process has it. Neither process waits for work of the
        other that its device has yet to do on that memory.

        Raises:
            RuntimeError: when it is pickled, the driver or the allocator does not share memory.
        """
        raise TypeError(f"memory of {self.type} devices cannot be shared between processes")

    def new_shared_event(self, device: torch.device) -> Event:
        """An event of a device that other processes can have: it is pickled for them.

        Each may record it, on a stream of the device, and wait for it. A wait is for the recording
        that was given to the device last, so the processes have to tell each other of it.
        """
        raise TypeError(f"events of {self.type} devices cannot be shared between processes")

    def identity(self, device: torch.device) -> str:
        """A name of a device that is the same in all processes of its machine; empty if unknown."""
        return ""

    def release_shared(self) -> None:
        """Give back the memory of `shared` tensors that no process has any more."""
        raise TypeError(f"memory of {self.type} devices cannot be shared between processes")

    # -- random numbers -----------------------------------------------------------------------

    @abstractmethod
    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that torch functions draw from there."""

    @abstractmethod
    def random_states(self) -> list[torch.Tensor]:
        """The states of the generators of all devices; none if no device was ever used."""

    @abstractmethod
    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Put the generators of the first devices into these states."""
