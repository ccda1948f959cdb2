"""The profile: what was measured, as plain data. No torch here: the planner reads this."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError

Seconds = NDArray[np.float64]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to send values from one device to another.

    Attributes:
        latency_seconds: one way, for the smallest message.
        bytes_per_second: how fast a large one travels; 0 where values are handed over for free.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of every call on one kind of device.

    Attributes:
        kind: the device as it was named, `"cpu"` or `"cuda:0"`.
        rows: the micro-batch sizes that were measured, ascending.
        forward: `forward[k][i]`, seconds of call `i` at `rows[k]`.
        backward: seconds of its backward, gradient accumulation included.
        spread: how far repeated measurements of the whole program lie apart, relative to their
            median.
        weight: `weight[k][i]`, the part of `backward[k][i]` that computes the gradients of weights
            and can be put off (`W`); 0 where a backward cannot be halved. Empty means not measured.
    """

    kind: str
    rows: tuple[int, ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    spread: float
    weight: tuple[tuple[float, ...], ...] = ()

    def seconds(self, rows: float) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of every call for a micro-batch of `rows`.

        Linear between measured sizes, in proportion to the largest one beyond it. Below the
        smallest it is that one's.
        """
        return _at(rows, self.rows, self.forward), _at(rows, self.rows, self.backward)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs of every call of a program, and what crosses every cut.

    Attributes:
        fingerprint: of the program it was measured on.
        batch_size: the rows of the example batch.
        devices: the devices to plan for, in order.
        kinds: the costs on each kind of device, by name.
        labels: a readable name for every call.
        weights: bytes of the parameters that each call is the first to use.
        boundary: `boundary[k]`, bytes per row that cross the cut before call `k`.
        forbidden: cuts that are not possible, with the reason.
        saved: bytes per row that each call is the first to hold for its backward. Empty means not
            measured.
        links: between devices, by `"cpu>cpu"`, the kinds of sender and receiver.
        capacity: bytes of memory of each kind of device, where it is known.
    """

    fingerprint: str
    batch_size: int
    devices: tuple[str, ...]
    kinds: dict[str, DeviceProfile]
    labels: tuple[str, ...]
    weights: tuple[int, ...]
    boundary: tuple[float, ...]
    forbidden: dict[int, str]
    saved: tuple[float, ...] = ()
    links: dict[str, Link] = msgspec.field(default_factory=dict)
    capacity: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        """The number of calls of the program."""
        return len(self.labels)

    def call_seconds(self, device: str | None = None) -> list[float]:
        """Forward and backward seconds of every call, for the largest micro-batch measured.

        Args:
            device: one of `devices`; the first by default.
        """
        costs = self.on(device or self.devices[0])
        return [f + b for f, b in zip(costs.forward[-1], costs.backward[-1], strict=True)]

    def on(self, device: str) -> DeviceProfile:
        """The costs on a device of the list."""
        return self.kinds[device]


def check_count(num_microbatches: int, batch_size: int) -> None:
    """Raise unless a batch can be split into that many micro-batches.

    Raises:
        InputError: it has fewer rows.
    """
    if not 1 <= num_microbatches <= batch_size:
        raise InputError(
            f"num_microbatches={num_microbatches}, but the batch has {batch_size} rows: choose "
            f'between 1 and {batch_size}, or "auto"'
        )


def _at(rows: float, measured: Sequence[int], table: Sequence[Sequence[float]]) -> Seconds:
    values = np.asarray(table, dtype=np.float64)
    if rows >= measured[-1]:
        return np.asarray(values[-1] * (rows / measured[-1]))
    if rows <= measured[0]:
        return np.asarray(values[0])
    right = int(np.searchsorted(measured, rows))
    left = right - 1
    share = (rows - measured[left]) / (measured[right] - measured[left])
    return np.asarray(values[left] + share * (values[right] - values[left]))
