"""When a device has done what a worker notes, and not when it was given to it."""

from __future__ import annotations

from time import monotonic_ns

import torch

from penstock.devices.kind import Moment
from penstock.devices.kinds import kind_of

Noted = list[tuple[int, int]]
"""When, by `time.monotonic_ns()`, and what."""


class DeviceLog:
    """What a worker notes while its device is behind: each time is that of the current stream.

    The device's clock is compared with this process's once, at the beginning: what is on the stream
    is waited for.

    Args:
        device: the worker's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = kind_of(device)
        self._moments: list[tuple[Moment, int]] = []
        self._first = self._kind.moment(device)
        self._first.synchronize()
        self._begun = monotonic_ns()

    def append(self, entry: tuple[int, int]) -> None:
        """Note something; the time of it is when the stream has come this far."""
        self._moments.append((self._kind.moment(self._device), entry[1]))

    def times(self) -> Noted:
        """What was noted, when the stream has come to the last of it; waits for that."""
        if not self._moments:
            return []
        self._moments[-1][0].synchronize()
        return [
            (self._begun + round(self._first.elapsed_time(moment) * 1e6), what)
            for moment, what in self._moments
        ]
