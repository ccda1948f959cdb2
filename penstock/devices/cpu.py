"""CPUs: no streams, no memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.devices.kind import DeviceKind, DeviceMemory, Moment, Stream
from penstock.devices.machine import processor


class Cpu(DeviceKind):
    """The CPU: whoever gives it work waits until it is done."""

    type = "cpu"
    has_streams = False

    def count(self) -> int:
        """All cores are one device."""
        return 1

    def name(self, device: torch.device) -> str:
        """The processor's name."""
        return processor()

    def devices(self) -> list[torch.device]:
        """The CPU, without a number."""
        return [torch.device("cpu")]

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def new_stream(self, device: torch.device) -> Stream:
        """There are none."""
        raise TypeError("CPUs have no streams")

    def current_stream(self, device: torch.device) -> Stream:
        """There is none."""
        raise TypeError("CPUs have no streams")

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """There are none."""
        raise TypeError("CPUs have no streams")

    def moment(self, device: torch.device) -> Moment:
        """There are none."""
        raise TypeError("CPUs have no streams")

    def used_on(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Memory of CPUs is freed when nobody refers to it, and all work on it is done by then."""

    def synchronize(self, device: torch.device) -> None:
        """It has done everything."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """All of its memory is read at once."""
        return False

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """There is no such memory, and no use for it."""
        return tensor

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """It is that of the whole machine, which all workers share."""
        return None

    def allocated(self, device: torch.device) -> tuple[int, int]:
        """It is not counted."""
        return 0, 0

    def generator(self, device: torch.device) -> torch.Generator:
        """The one of the process."""
        return torch.default_generator

    def random_states(self) -> list[torch.Tensor]:
        """That of the process."""
        return [torch.get_rng_state()]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Put the generator of the process there."""
        for state in states[:1]:
            torch.set_rng_state(state)
