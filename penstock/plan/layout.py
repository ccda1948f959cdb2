"""A way to share a program out: what its stages cost in time and memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.plan.shares import Sums
from penstock.profile.data import Link, Profile
from penstock.profile.rows import split_rows
from penstock.schedule import Costs
from penstock.simulate import Network, Simulator

Floats = NDArray[np.float64]
Span = tuple[int, int]
"""Calls, the first and the one after the last."""


class Stretch(NamedTuple):
    """What one stage is.

    Attributes:
        worker: who runs it.
        start: its first call.
        stop: the one after its last.
        recompute: the spans of its calls that are recomputed.
    """

    worker: int
    start: int
    stop: int
    recompute: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Memory:
    """What training holds, besides activations.

    Attributes:
        optimizer_state: bytes of optimizer state for every byte of weights: 2 for Adam, 1 for SGD
            with momentum.
        limit: bytes that every worker may hold; `None` for what the profile says of its device.
        replicas: of the model.
        sums: how they add up gradients. Weights, gradients and optimizer state are in one memory if
            that is `"shared"`. Otherwise each replica has weights of its own, and the optimizer
            state is divided among them; but if it is `"gathered"`, the first one has all of it.
        is_first: whether it is about the first replica, if gradients are gathered there.
        is_even: whether replicas run equally many micro-batches, so that none keeps the gradients
            of several, if gradients are gathered.
        copies_gradients: whether a worker has gradients twice at the end of a pass, as it computes
            them in memory of its own and copies them to that of the model's parameters.
    """

    optimizer_state: float = 2.0
    limit: int | None = None
    replicas: int = 1
    sums: Sums = "chained"
    is_first: bool = True
    is_even: bool = True
    copies_gradients: bool = False

    def per_weight(self, microbatches: int) -> float:
        """Bytes for every byte of weights: itself, its gradient, and its optimizer state.

        Gradients that wait for their turn come to it: one set for each replica, in their memory or
        on the devices of the first one; on a chain one for every micro-batch that a replica runs.

        Args:
            microbatches: of each replica.
        """
        if self.replicas == 1:
            return 2.0 + self.optimizer_state + self.copies_gradients
        if self.sums == "shared":
            return (2.0 + self.optimizer_state) / self.replicas + 1.0
        if self.sums == "gathered":
            kept = self.replicas * (1 if self.is_even else microbatches)
            return 2.0 + self.optimizer_state + kept if self.is_first else 2.0
        return 2.0 + self.optimizer_state / self.replicas + microbatches

    def caps(self, profile: Profile) -> Floats:
        """(workers,): the bytes that every worker may hold, infinite where it is not known."""
        known = [profile.capacity.get(device, np.inf) for device in profile.devices]
        return np.array(known if self.limit is None else [self.limit] * len(known), dtype=float)


class Layout:
    """The calls' costs for one number of micro-batches.

    Args:
        profile: what was measured.
        count: the number of micro-batches.
        rows: of every micro-batch; by default the profile's batch is split.

    Attributes:
        rows: of every micro-batch.
        seconds: (workers, calls); forward and backward of a mean micro-batch.
        partitions: the best cuts without a memory limit that were found so far, by placement,
            weight of filling and allowed positions.
    """

    def __init__(self, profile: Profile, count: int, rows: Sequence[int] | None = None) -> None:
        self.profile = profile
        self.count = count
        self.rows = split_rows(profile.batch_size, count) if rows is None else rows
        self.partitions: dict[Hashable, tuple[int, ...]] = {}
        self._by_rows = {size: self._table(size) for size in sorted(set(self.rows))}
        totals = {size: table[0] + table[1] for size, table in self._by_rows.items()}
        mean: Floats = np.mean([totals[size] for size in self.rows], axis=0)
        self.seconds = mean
        # The pipeline may fill and drain with its smallest micro-batch: no bound may count more.
        takes_time = mean > 0
        ratios = totals[min(self.rows)][takes_time] / mean[takes_time]
        self.least_fill = float(ratios.min(initial=1.0))

    @property
    def most_rows(self) -> int:
        """The rows of the largest micro-batch."""
        return max(self.rows)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """(calls + 1,): where a cut may be."""
        places = np.ones(self.profile.num_calls + 1, dtype=bool)
        places[list(self.profile.forbidden)] = False
        return places

    @cached_property
    def pieces(self) -> Floats:
        """(workers, pieces); the seconds of all calls between two places for a cut."""
        places = np.flatnonzero(self.allowed[:-1])
        return np.add.reduceat(self.seconds, np.union1d(places, [0]), axis=1)

    @cached_property
    def forward(self) -> Floats:
        """(workers, calls); the forward of the largest micro-batch."""
        return self._by_rows[self.most_rows][0]

    def forward_of(self, rows: int) -> Floats:
        """(workers, calls); the forward of a micro-batch of so many rows, one of `rows`."""
        return self._by_rows[rows][0]

    @cached_property
    def saved(self) -> Floats:
        """(calls,); bytes that a micro-batch's backward needs of every call."""
        return np.asarray(self.profile.saved or [0.0] * self.profile.num_calls) * self.most_rows

    @cached_property
    def boundary(self) -> Floats:
        """(calls + 1,); bytes of a micro-batch that cross every cut."""
        return np.asarray(self.profile.boundary) * self.most_rows

    @cached_property
    def tied(self) -> Floats:
        """(calls + 1,); bytes of the weights that cross every cut, and of their gradients."""
        return np.asarray(self.profile.tied or [0.0] * (self.profile.num_calls + 1))

    def carried(self, rows: float) -> Floats:
        """(calls + 1,); bytes of a micro-batch of so many rows that links carry across every cut.

        This is the mean of both directions: weights do not go with every micro-batch, but their
        gradients come back.
        """
        found: Floats = np.asarray(self.profile.crossing) * rows + self.tied / 2
        return found

    @cached_property
    def weights(self) -> Floats:
        """Bytes of the weights of every call; shape (calls,)."""
        return np.asarray(self.profile.weights, dtype=np.float64)

    @cached_property
    def passing(self) -> float:
        """Bytes of the largest result and its gradient, which are there for a moment."""
        return 2.0 * self.most_rows * max(self.profile.outputs, default=0.0)

    def _table(self, rows: float) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds of forward, backward, its weight half, and what halving costs, at these rows.

        Each is (workers, calls).
        """
        costs = [self.profile.on(device).costs(rows) for device in self.profile.devices]
        forward, backward, weight, halving = map(np.stack, zip(*costs, strict=True))
        return forward, backward, weight, halving

    def hops(self, stretches: Sequence[Stretch]) -> list[Link]:
        """The link between every two neighbouring stages; those of one worker need none."""
        devices = self.profile.devices
        pairs = pairwise(stretch.worker for stretch in stretches)
        return [self.profile.link(devices[a], devices[b]) if a != b else Link() for a, b in pairs]

    def crossing(self, placement: Sequence[int], rows: int | None = None) -> Floats | None:
        """(stages - 1, calls + 1): one-way seconds of every boundary after every stage.

        Args:
            placement: the worker of every stage.
            rows: of the micro-batch, by default the largest.
        """
        if len(placement) < 2 or not self.profile.links:
            return None
        sizes = self.carried(rows or self.most_rows)
        hops = self.hops([Stretch(worker, 0, 0) for worker in placement])
        found = np.zeros((len(hops), len(sizes)))
        for row, (a, b), hop in zip(found, pairwise(placement), hops, strict=True):
            if a != b:
                row += hop.latency_seconds
                row += sizes / hop.bytes_per_second if hop.bytes_per_second else 0.0
        return found

    def costs(self, stretches: Sequence[Stretch], rows: int | None = None) -> Costs:
        """What the stages take for one micro-batch, by default the largest."""
        rows = rows or self.most_rows
        tables = self._by_rows[rows]
        forward, backward, weight, halving = (_sums(table, stretches) for table in tables)
        for k, stretch in enumerate(stretches):
            again = (tables[0][stretch.worker, slice(*span)] for span in stretch.recompute)
            backward[k] += sum(float(seconds.sum()) for seconds in again)
        hops = self.hops(stretches)
        crossing = self.carried(rows)[[s.start for s in stretches[1:]]].tolist()
        return Costs(
            forward=tuple(forward),
            backward=tuple(backward),
            weight=tuple(weight),
            halving=tuple(halving),
            latency=tuple(hop.latency_seconds for hop in hops),
            transfer=tuple(
                size / hop.bytes_per_second if hop.bytes_per_second else 0.0
                for size, hop in zip(crossing, hops, strict=True)
            ),
        )

    def busiest(self, stretches: Sequence[Stretch]) -> float:
        """Seconds that the worker with the most work has at least: no step takes less."""
        work = [0.0] * len(self.seconds)
        for stretch, seconds in zip(stretches, _sums(self.seconds, stretches), strict=True):
            work[stretch.worker] += seconds
        return self.count * max(work) * (1 - 1e-9)  # rounding may have left more

    def simulated(self, simulator: Simulator, stretches: Sequence[Stretch]) -> float:
        """The simulated seconds of a step's actions, each micro-batch with its own number of rows.

        What a pass takes besides its actions is not included.
        """
        by_rows = {rows: self.costs(stretches, rows) for rows in self._by_rows}
        of = [by_rows[rows].by_kind for rows in self.rows]
        durations = [of[k][kind][stage] for kind, stage, k in simulator.actions]
        costs = by_rows[self.most_rows]
        profile = self.profile
        network = Network.of(costs, overlap=profile.overlap, overhead=profile.overhead_seconds)
        return max(simulator.times(durations, network)[1])

    def held(self, stretch: Stretch) -> float:
        """Bytes that a stage holds for every micro-batch in flight.

        What enters it, what its calls save, and of spans that are recomputed what enters them.
        """
        total = self.boundary[stretch.start] + self.saved[stretch.start : stretch.stop].sum()
        for start, stop in stretch.recompute:
            total -= self.saved[start:stop].sum()
        inner = {edge for span in stretch.recompute for edge in span}
        total += sum(self.boundary[k] for k in inner if stretch.start < k < stretch.stop)
        return max(0.0, float(total))  # rounding may leave less

    def standing(self, stretch: Stretch, memory: Memory) -> float:
        """Bytes that a stage holds all the time, and while it works on a micro-batch."""
        per_weight = memory.per_weight(self.count)
        again = [float(self.saved[start:stop].sum()) for start, stop in stretch.recompute]
        return (
            float(self.weights[stretch.start : stretch.stop].sum()) * per_weight
            + max(again, default=0.0)
            + float(self.tied[stretch.start])
            + self.passing
        )

    def peaks(
        self, stretches: Sequence[Stretch], in_flight: Sequence[int], memory: Memory
    ) -> list[float]:
        """The most bytes of every worker, when its stages hold so many micro-batches at once."""
        peaks = [0.0] * len(self.profile.devices)
        for stretch, count in zip(stretches, in_flight, strict=True):
            standing = self.standing(stretch, memory)
            peaks[stretch.worker] += standing + count * self.held(stretch)
        return peaks


def _sums(table: Floats, stretches: Sequence[Stretch]) -> list[float]:
    """What a (workers, calls) table has for each stretch, in all."""
    calls = table.shape[1]
    edges = [s.worker * calls + edge for s in stretches for edge in (s.start, s.stop)]
    if edges[-1] == table.size:  # an end behind all is not written down
        edges.pop()
    found: list[float] = np.add.reduceat(table.ravel(), edges)[::2].tolist()
    return found
