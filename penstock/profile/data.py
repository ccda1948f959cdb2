"""The profile: what was measured, as plain data. No torch here: the planner reads this."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError
from penstock.files import read_whole, readable, save_whole, version_of, what_is

Seconds = NDArray[np.float64]

VERSION = 3
"""Of the files that profiles are written to."""

_DIGITS = 6  # of every number in a file; no clock gives more
_HIGH, _FAIR = 0.05, 0.15  # errors up to which the confidence is so


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to send values from one device to another.

    Attributes:
        latency_seconds: one way, for the smallest message.
        bytes_per_second: how fast a large one travels; 0 where values are handed over for free.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


ADDED_PER_SECOND = 4e9
"""Bytes of gradients that about one core of a CPU adds to others in a second."""


class CallCosts(NamedTuple):
    """The seconds that every call takes for a micro-batch, each of shape (calls,).

    Attributes:
        forward: of the forward.
        backward: of the whole backward.
        weight: of the part of the backward that can be put off.
        halving: by which the two halves of a backward take longer than the whole one.
    """

    forward: Seconds
    backward: Seconds
    weight: Seconds
    halving: Seconds


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The cost of every call on one kind of device.

    Attributes:
        kind: the device as it was named, `"cpu"` or `"cuda:0"`.
        rows: the micro-batch sizes that were measured, ascending.
        forward: `forward[k][i]`, seconds of call `i` at `rows[k]`.
        backward: seconds of its backward, gradient accumulation included.
        spread: how far repeated measurements of the whole program lie apart, relative to their
            median: the width of the middle half of them.
        weight: `weight[k][i]`, the part of `backward[k][i]` that computes the gradients of weights
            and can be put off (`W`); 0 where a backward cannot be halved. Empty means not measured.
        halving: `halving[k]`, the seconds that forward and backward take longer at `rows[k]` if
            every backward is halved that can be. Empty means not measured.
        contention: `contention[k]`, how many times as long forward and backward take at `rows[k]`
            while all workers of this kind are at work as on one alone, which has the memory and the
            interpreter to itself. Empty means 1.
        added_per_second: bytes of gradients that a worker adds to others in a second; by default
            what about one core of a CPU adds.
        launching: seconds in which the CPU launches the work of one micro-batch on the device; 0
            for CPUs. They hardly depend on the number of rows. This is the least over all sizes, as
            the CPU may also wait for the device while it launches.
    """

    kind: str
    rows: tuple[int, ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    spread: float
    weight: tuple[tuple[float, ...], ...] = ()
    halving: tuple[float, ...] = ()
    contention: tuple[float, ...] = ()
    added_per_second: float = ADDED_PER_SECOND
    launching: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "halving", "contention"):
            lines = len(getattr(self, name))
            optional = name not in ("forward", "backward")
            if lines != len(self.rows) and (lines or not optional):
                raise InputError(
                    f"{name} has {lines} entries, but {len(self.rows)} sizes were measured"
                )

    @cached_property
    def costs(self) -> Callable[[float], CallCosts]:
        """What every call takes at so many rows; computed once, as planning asks often."""
        return cache(self._costs)

    def _costs(self, rows: float) -> CallCosts:
        return CallCosts(*self.seconds(rows), self.weight_seconds(rows), self.halving_seconds(rows))

    def seconds(self, rows: float) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of every call for a micro-batch of `rows`.

        Between two measured sizes, times lie on the line through both; below the smallest, on the
        line through the two smallest, with neither a negative launch nor a negative rate. Above the
        largest size, a row costs what it costs there: the slope of two measurements would multiply
        their noise, and make a row cheaper than any that was measured. If only one size was
        measured, smaller ones take as long.
        """
        return _at(rows, self.rows, self.forward), _at(rows, self.rows, self.backward)

    def weight_seconds(self, rows: float) -> Seconds:
        """The seconds of every call's backward that can be put off; none where not measured."""
        if not self.weight:
            return np.zeros(len(self.forward[0]))
        parts = _at(rows, self.rows, self.weight), _at(rows, self.rows, self.backward)
        return np.minimum(*parts)

    def halving_seconds(self, rows: float) -> Seconds:
        """The seconds by which halves take longer than a whole backward, for every call.

        The measured total is divided among calls in proportion to their weight halves.
        """
        weight = self.weight_seconds(rows)
        if not self.halving:
            return np.zeros(len(weight))
        return np.asarray(weight * (_at(rows, self.rows, self.halving) / max(weight.sum(), 1e-12)))

    def launched(self, rows: float) -> float:
        """The part of a micro-batch's time in which the CPU launches it, from 0 to 1."""
        total = float(sum(map(sum, self.seconds(rows))))
        return min(1.0, self.launching / total) if total else 0.0

    def alone(self) -> DeviceProfile:
        """The costs on a worker while no other is at work."""
        if not self.contention:
            return self
        ratios = self.contention

        def less(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            lines = zip(table, ratios, strict=False)  # there are none if it was not measured
            return tuple(tuple(seconds / ratio for seconds in line) for line, ratio in lines)

        return msgspec.structs.replace(
            self,
            forward=less(self.forward),
            backward=less(self.backward),
            weight=less(self.weight),
            halving=tuple(s / ratio for s, ratio in zip(self.halving, ratios, strict=False)),
            contention=(),
        )

    @property
    def between(self) -> float:
        """How far a measured size lies from the line through its neighbours, relative; the median.

        It says how wrong the times of sizes are that were not measured; 0 with two sizes or fewer.
        """
        totals = [sum(f) + sum(b) for f, b in zip(self.forward, self.backward, strict=True)]
        errors = []
        for k in range(1, len(totals) - 1):
            others = self.rows[k - 1 : k + 2 : 2], totals[k - 1 : k + 2 : 2]
            off = abs(float(np.interp(self.rows[k], *others)) - totals[k])
            errors.append(off / max(totals[k], 1e-12))
        return statistics.median(errors) if errors else 0.0


class Confidence(msgspec.Struct, frozen=True, kw_only=True):
    """How sure a profile is; `str` of it says so in words.

    Attributes:
        spread: how far repeated measurements lie apart, relative, on the worst kind of device.
        between: how wrong the times of sizes that were not measured may be, relative, on the worst
            kind of device.
    """

    spread: float
    between: float

    @property
    def error(self) -> float:
        """How wrong a predicted time may be, relative."""
        return max(self.spread, self.between)

    @property
    def level(self) -> str:
        """`"high"`, `"fair"` or `"low"`, by the error that is to be expected."""
        return "high" if self.error <= _HIGH else "fair" if self.error <= _FAIR else "low"

    def __str__(self) -> str:
        return (
            f"{self.level}, about ±{self.error:.0%}: repeated measurements lie {self.spread:.0%} "
            f"apart, sizes that were not measured may be {self.between:.0%} off"
        )


class Profile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Measured costs of every call of a program, and what crosses every cut.

    Attributes:
        fingerprint: of the program it was measured on.
        batch_size: the rows of the example batch.
        devices: the devices to plan for, in order.
        kinds: the costs on each kind of device, by name.
        labels: a readable name for every call.
        weights: bytes of the parameters that each call is the first to use.
        boundary: `boundary[k]`, bytes per row that cross the cut before call `k`, without weights.
        tied: bytes of the weights that cross every cut because later calls use them as well. The
            weights cross it once in a pass, their gradients with every micro-batch. Empty if there
            are none.
        forbidden: cuts that are not possible, with the reason.
        travelling: like `boundary`, with the bytes that links carry if values are rounded to
            another dtype for the way. Empty if they are not.
        parameters: how many parameters each call is the first to use. Empty means not known.
        saved: bytes per row that each call is the first to hold for its backward. Empty means not
            measured.
        links: between devices, by `"cpu>cpu"`, the kinds of sender and receiver; see `link`.
        capacity: bytes of memory of each kind of device, where it is known.
        outputs: bytes per row of the memory that each call's results are the first to occupy.
            Empty means not known.
        overhead_seconds: what a worker needs for an action beside the calls in it.
        adding_seconds: the seconds that each parameter adds to a backward of one of several
            replicas, because gradients are added up in the order of micro-batches.
        pass_seconds: what a pass takes besides its actions: a batch is split, handed to the workers
            and put together again, and there is a loss. For inference, the least time from one
            batch of `map` to the next.
        overlap: whether a worker goes on while what it sends is under way, and need not copy it.
        threads: intra-op threads of each CPU worker; 0 where it is not known.
        one_replica: why the model can have one replica only; empty if it can have several.
        no_recomputing: why several replicas cannot recompute; empty if they can.
        states: bytes per row of the states that each call makes, such as keys and values: tensors
            in objects of plain classes in the model's result, which sessions leave with the stage.
            Empty means not known.
        inference: whether forwards alone were measured, in evaluation mode; states do not cross
            cuts then.
        version: of the file format.
    """

    fingerprint: str
    batch_size: int
    devices: tuple[str, ...]
    kinds: dict[str, DeviceProfile]
    labels: tuple[str, ...]
    weights: tuple[int, ...]
    boundary: tuple[float, ...]
    forbidden: dict[int, str]
    parameters: tuple[int, ...] = ()
    saved: tuple[float, ...] = ()
    travelling: tuple[float, ...] = ()
    links: dict[str, Link] = msgspec.field(default_factory=dict)
    capacity: dict[str, int] = msgspec.field(default_factory=dict)
    outputs: tuple[float, ...] = ()
    overhead_seconds: float = 0.0
    adding_seconds: float = 0.0
    pass_seconds: float = 0.0
    overlap: bool = True
    threads: int = 0
    one_replica: str = ""
    no_recomputing: str = ""
    states: tuple[float, ...] = ()
    inference: bool = False
    tied: tuple[float, ...] = ()
    version: int = VERSION

    @property
    def confidence(self) -> Confidence:
        """How far its times can be trusted, by the worst kind of device."""
        kinds = self.kinds.values()
        return Confidence(
            spread=max(kind.spread for kind in kinds), between=max(kind.between for kind in kinds)
        )

    @property
    def crossing(self) -> tuple[float, ...]:
        """Bytes per row that links carry across every cut."""
        return self.travelling or self.boundary

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
        """The costs on one of `devices`, by its name."""
        return self.kinds[device]

    def link(self, one: str, other: str) -> Link:
        """The link from one device to another, by their names.

        Only links between neighbours of the list are measured. Another one is taken to be as slow
        as the slowest of them, so that nothing is chosen because it was not measured. If there are
        none, values are handed over for free.
        """
        return self.links.get(f"{one}>{other}", self._slowest_link)

    @cached_property
    def _slowest_link(self) -> Link:
        links = self.links.values()
        speeds = [link.bytes_per_second for link in links if link.bytes_per_second]
        return Link(
            latency_seconds=max((link.latency_seconds for link in links), default=0.0),
            bytes_per_second=min(speeds, default=0.0),
        )

    def alone(self, device: str) -> Profile:
        """The same for one of `devices` alone."""
        kinds = {**self.kinds, device: self.on(device).alone()}
        return msgspec.structs.replace(self, devices=(device,), kinds=kinds)

    @cached_property
    def of_replica(self) -> Profile:
        """The same for one of several replicas: backwards add gradients up in order."""
        more = [self.adding_seconds * count for count in self.parameters]
        if not any(more):
            return self
        kinds = {}
        for name, kind in self.kinds.items():
            lines = [zip(line, more, strict=True) for line in kind.backward]
            backward = tuple(tuple(seconds + own for seconds, own in line) for line in lines)
            kinds[name] = msgspec.structs.replace(kind, backward=backward)
        return msgspec.structs.replace(self, kinds=kinds)

    def encode(self) -> bytes:
        """JSON with a line for every list of numbers, which have six digits."""
        return readable(_rounded(msgspec.to_builtins(self, str_keys=True)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON; an existing file is replaced in one move.

        Raises:
            InputError: it cannot be written there.
        """
        save_whole(path, self.encode(), "profile")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            InputError: there is no such file, it is not a profile, or one of another version.
        """
        return cls.decode(read_whole(path, "profile"), os.fspath(path))

    @classmethod
    def decode(cls, content: bytes, path: str) -> Profile:
        """The profile that `encode` made into these bytes; `path` names them in errors.

        Raises:
            InputError: as of `load`.
        """
        if what_is(content) == "plan":
            raise InputError(f"{path} is a plan; give the profile that it was made from")
        try:
            version = version_of(content)
            if version != VERSION:
                raise InputError(
                    f"{path} is a profile of version {version}, this Penstock reads version "
                    f"{VERSION}; measure again"
                )
            return msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a profile that Profile.save wrote: {error}") from error


def check_count(num_microbatches: int, batch_size: int) -> None:
    """Raise unless a batch can be split into that many micro-batches.

    Raises:
        InputError: it has fewer rows, or that is no number.
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise InputError(f'num_microbatches={num_microbatches!r}; give a number, or "auto"')
    if not 1 <= num_microbatches <= batch_size:
        raise InputError(
            f"num_microbatches={num_microbatches}, but the batch has {batch_size} rows: choose "
            f'between 1 and {batch_size}, or "auto"'
        )


def _at(rows: float, measured: Sequence[int], table: Sequence[float | Sequence[float]]) -> Seconds:
    values = np.asarray(table, dtype=np.float64)
    if rows >= measured[-1]:
        return np.asarray(values[-1] * (rows / measured[-1]))
    if rows >= measured[0]:
        right = int(np.searchsorted(measured, rows, side="right"))
        left = right - 1
        share = (rows - measured[left]) / (measured[right] - measured[left])
        return np.asarray(values[left] + share * (values[right] - values[left]))
    if len(measured) == 1:
        return np.asarray(values[0])
    rate = (values[1] - values[0]) / (measured[1] - measured[0])
    rate = np.clip(rate, 0.0, values[0] / measured[0])  # neither it nor the launch is negative
    return np.asarray(values[0] - rate * (measured[0] - rows))


def _rounded(value: object) -> Any:
    """The same data, its numbers with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
