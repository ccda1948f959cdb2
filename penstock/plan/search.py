"""Choosing the cuts, the number of micro-batches and the schedule.

For every number of micro-batches the partition is exact; which of its objectives suits a schedule
best is decided by simulating the schedule on the stages that it gives, and so is whether a cut a
few calls away suits it better still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError
from penstock.plan.asked import Cut, positions
from penstock.plan.partition import Partition, partition
from penstock.plan.plan import Candidate, Plan, StagePlan
from penstock.profile.data import Profile, check_count
from penstock.schedule import SCHEDULES, Action, Kind, build
from penstock.simulate import simulate

Auto = Literal["auto"]

# In order of preference among equals: what holds least, first.
_PREFERENCE = ("1f1b", "eager-1f1b", "gpipe", "naive")
_EQUAL = 1.002  # predictions closer than this say nothing
_FILLS = (1.0, 0.5, 0.0)
_MOST_MOVES = 20
_REACH = 4  # places on each side of a cut


def plan(
    profile: Profile,
    *,
    num_microbatches: int | Auto = "auto",
    schedule: str = "auto",
    cuts: Sequence[Cut] | None = None,
) -> Plan:
    """The best plan for the profile's devices, one stage on each, in their order.

    Args:
        profile: measured costs.
        num_microbatches: how many, or `"auto"` for the best of those whose size was measured.
        schedule: a name of `penstock.schedule.SCHEDULES`, or `"auto"` for the best.
        cuts: cut before just these, instead of choosing: modules by their qualified names, or
            calls by their numbers.

    Returns:
        the plan, with what it is predicted to take and the bound for it.

    Raises:
        PlanError: there are fewer calls, or fewer places to cut, than the devices need; or
            `cuts` has one that is not possible.
        InputError: an unknown schedule, or more micro-batches than rows.
    """
    check_schedule(schedule)
    asked = None
    if cuts is not None:
        asked = positions(profile.labels, profile.forbidden, len(profile.devices), cuts)
    names = _PREFERENCE if schedule == "auto" else (schedule,)
    counts = _counts(profile, num_microbatches)
    best: list[_Option] = []
    for count in counts:
        layout = _Layout(profile, count)
        best.append(layout.best(names, asked))
    chosen = min(best, key=lambda option: option.seconds)
    # A smaller count that is as good holds less and launches less.
    chosen = next(option for option in best if option.seconds <= chosen.seconds * _EQUAL)
    return chosen.layout.plan(chosen, best)


class _Option:
    """One way to run: a layout, its cuts and a schedule, with the simulated step time."""

    def __init__(
        self, layout: _Layout, cuts: tuple[int, ...], schedule: str, seconds: float
    ) -> None:
        self.layout = layout
        self.cuts = cuts
        self.schedule = schedule
        self.seconds = seconds


class _Layout:
    """The calls' costs for one number of micro-batches."""

    def __init__(self, profile: Profile, count: int) -> None:
        self.profile = profile
        self.count = count
        self.rows = _split_rows(profile.batch_size, count)
        self._by_rows = {rows: self._table(rows) for rows in set(self.rows)}
        totals = {rows: forward + backward for rows, (forward, backward) in self._by_rows.items()}
        mean: NDArray[np.float64] = np.mean([totals[rows] for rows in self.rows], axis=0)
        self.seconds = mean
        # The pipeline may fill and drain with its smallest micro-batch: no bound may count more.
        self._least_fill = float(np.min(totals[min(self.rows)] / np.maximum(mean, 1e-12)))
        self.allowed = [k not in profile.forbidden for k in range(profile.num_calls + 1)]

    def _table(self, rows: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Forward and backward seconds, (devices, calls), for a micro-batch of `rows`."""
        pairs = [self.profile.on(device).seconds(rows) for device in self.profile.devices]
        return np.stack([f for f, _ in pairs]), np.stack([b for _, b in pairs])

    def best(self, names: Sequence[str], cuts: Sequence[int] | None) -> _Option:
        """The fastest of these schedules, each on the cuts that suit it best."""
        choices = [tuple(cuts)] if cuts is not None else self._cut_choices()
        best: _Option | None = None
        for name in names:
            options = [_Option(self, cut, name, self._simulated(name, cut)) for cut in choices]
            option = min(options, key=lambda o: o.seconds)
            if cuts is None:
                option = self._refined(option)
            if best is None or option.seconds * _EQUAL < best.seconds:
                best = option
        if best is None:
            raise InputError("no schedule was given to choose from")
        return best

    def _refined(self, option: _Option) -> _Option:
        """Move single cuts as long as the simulation gets faster.

        The partition's objectives count forward and backward together; how a schedule interleaves
        them, only the simulation knows.
        """
        for _ in range(_MOST_MOVES):
            moves = [
                _Option(self, cuts, option.schedule, self._simulated(option.schedule, cuts))
                for cuts in self._neighbours(option.cuts)
            ]
            best = min(moves, key=lambda o: o.seconds, default=option)
            if best.seconds >= option.seconds:
                break
            option = best
        return option

    def _neighbours(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The cuts with one of them moved, to the places near it."""
        edges = [0, *cuts, self.profile.num_calls]
        for s in range(1, len(edges) - 1):
            for places in (
                range(edges[s] + 1, edges[s + 1]),
                range(edges[s] - 1, edges[s - 1], -1),
            ):
                allowed = (k for k in places if self.allowed[k])
                for k in islice(allowed, _REACH):
                    yield (*edges[1:s], k, *edges[s + 1 : -1])

    def _cut_choices(self) -> list[tuple[int, ...]]:
        found = [self._partition(fill).cuts for fill in _FILLS]
        return list(dict.fromkeys(found))

    def _partition(self, fill: float) -> Partition:
        return partition(
            self.seconds,
            num_microbatches=self.count,
            fill=fill,
            allowed=self.allowed,
            tie=np.asarray(self.profile.boundary),
        )

    def _simulated(self, name: str, cuts: tuple[int, ...]) -> float:
        stages = len(self.profile.devices)
        times = {rows: self.stage_times(cuts, rows) for rows in self._by_rows}

        def seconds(action: Action) -> float:
            forward, backward = times[self.rows[action.microbatch]]
            return (forward if action.kind is Kind.FORWARD else backward)[action.stage]

        return simulate(build(name, stages, self.count), seconds).seconds

    def stage_times(self, cuts: Sequence[int], rows: int) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of every stage, for a micro-batch of `rows`."""
        edges = [0, *cuts, self.profile.num_calls]
        forward, backward = self._by_rows[rows]
        spans = list(pairwise(edges))
        return (
            [float(forward[s, a:b].sum()) for s, (a, b) in enumerate(spans)],
            [float(backward[s, a:b].sum()) for s, (a, b) in enumerate(spans)],
        )

    def plan(self, option: _Option, considered: Sequence[_Option]) -> Plan:
        """The plan of an option."""
        profile = self.profile
        edges = [0, *option.cuts, profile.num_calls]
        rows = max(self.rows)
        forward, backward = self.stage_times(option.cuts, rows)
        stages = [
            StagePlan(
                worker=s,
                device=device,
                calls=(edges[s], edges[s + 1]),
                first=profile.labels[edges[s]],
                last=profile.labels[edges[s + 1] - 1],
                weight_bytes=sum(profile.weights[edges[s] : edges[s + 1]]),
                input_bytes=round(profile.boundary[edges[s]] * rows),
                forward_seconds=forward[s],
                backward_seconds=backward[s],
            )
            for s, device in enumerate(profile.devices)
        ]
        return Plan(
            fingerprint=profile.fingerprint,
            batch_size=profile.batch_size,
            num_microbatches=self.count,
            schedule=option.schedule,
            stages=tuple(stages),
            predicted_step_seconds=option.seconds,
            bound_seconds=self._partition(min(1.0, self._least_fill)).objective,
            one_device_seconds=_one_device(profile),
            considered=tuple(
                Candidate(
                    schedule=o.schedule,
                    num_microbatches=o.layout.count,
                    predicted_step_seconds=o.seconds,
                )
                for o in considered
            ),
        )


def _one_device(profile: Profile) -> float:
    """The first device alone, at the best of the measured micro-batch sizes."""
    device = profile.on(profile.devices[0])
    totals = []
    for rows in (*device.rows, profile.batch_size):
        forward, backward = device.seconds(rows)
        totals.append(float(forward.sum() + backward.sum()) * profile.batch_size / rows)
    return min(totals)


def _counts(profile: Profile, asked: int | Auto) -> list[int]:
    batch_size = profile.batch_size
    if asked == "auto":
        least = max(profile.on(device).rows[0] for device in profile.devices)
        counts = {-(-batch_size // rows) for rows in _measured_sizes(profile)}
        return sorted(count for count in counts if batch_size // count >= least) or [1]
    check_count(asked, batch_size)
    return [asked]


def _measured_sizes(profile: Profile) -> set[int]:
    """On every device. Kernels work in blocks: a size between two of them may cost far more."""
    sizes = [set(profile.on(device).rows) for device in profile.devices]
    return {rows for rows in set.intersection(*sizes) if rows <= profile.batch_size}


def _split_rows(batch_size: int, count: int) -> list[int]:
    small, larger = divmod(batch_size, count)
    return [small + 1] * larger + [small] * (count - larger)


def check_schedule(name: str) -> None:
    """Raise unless a schedule has this name.

    Raises:
        InputError: none has.
    """
    if name != "auto" and name not in SCHEDULES:
        raise InputError(f'schedule={name!r} is unknown; choose {", ".join(SCHEDULES)} or "auto"')
