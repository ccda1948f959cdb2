"""The best schedule for measured stages: the fixed ones, and one made to fit.

Fixed schedules are made for equal stages. A fitted one (`penstock.schedule.fitted`) has rules
instead of an order, and a simulation of a step costs a fraction of a millisecond: so try rules
until the step takes what the bound says, or the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.errors import InputError, PlanError
from penstock.plan.bound import schedule_bound
from penstock.schedule import SCHEDULES, Costs, Kind, Rules, Schedule, build, check
from penstock.simulate import Network, memory_over_time, simulate

_EQUAL = 1e-9  # sums of the same times in another order
_CLOSE = 1e-4  # of the bound; closer than this, no measurement tells the difference
_DEPTHS = (2.0, 1.0, 3.0, math.inf)  # round trips that a stage is ahead, the most likely ones first
_PATIENCE = (0.0, 0.3, 0.6, 1.0)
_STEPS = (1, -1, 2, -2)


@dataclass(frozen=True)
class Room:
    """The memory that there is for micro-batches in flight.

    Attributes:
        workers: `workers[w]` is the bytes that worker `w` has for them.
        held: `held[s]` is the bytes that stage `s` holds for one of them.
        put_off: the bytes that remain between the halves of a backward. Empty means all of `held`.
    """

    workers: tuple[float, ...]
    held: tuple[float, ...]
    put_off: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fit:
    """A schedule that was found, and how good it is.

    Attributes:
        name: its name in `penstock.schedule.SCHEDULES`.
        rules: if that is `"fitted"`, the rules that make it again, from the same costs, for this or
            another number of micro-batches; else None.
        schedule: the schedule.
        seconds: what a step takes by simulation.
        bound: what no schedule on this placement can beat, whatever its memory, in seconds.
        fixed: what a step takes with every fixed schedule that is possible, by name.
        tried: how many schedules were simulated.
    """

    name: str
    rules: Rules | None
    schedule: Schedule
    seconds: float
    bound: float
    fixed: dict[str, float]
    tried: int

    @property
    def excess(self) -> float:
        """By what share of the bound a step takes longer than the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def fit(
    costs: Costs,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    *,
    room: Room | None = None,
    split: bool = False,
    overlap: bool = True,
    overhead: float = 0.0,
    budget: int = 100,
) -> Fit:
    """The fastest schedule that was found for these costs; never slower than any fixed one.

    Args:
        costs: what the stages take, in seconds per micro-batch.
        num_microbatches: the number of micro-batches, `m`.
        placement: the worker of every stage. By default every stage has its own.
        room: the memory for micro-batches in flight. By default there is enough for all.
        split: whether backwards may come in halves.
        overlap: whether workers go on while they send.
        overhead: the seconds that every action costs besides its work.
        budget: at most this many rules are tried.

    Raises:
        InputError: the placement, the room or the number of micro-batches does not fit.
        PlanError: not even one micro-batch at a time fits in the room.
    """
    homes = tuple(range(costs.num_stages)) if placement is None else tuple(placement)
    bound = schedule_bound(costs, num_microbatches, homes, split=split)
    network = Network.of(costs, overlap=overlap, overhead=overhead)
    search = _Search(costs, num_microbatches, homes, network, room, bound)
    search.try_fixed(split)
    for rules in _likely(search, split):
        if search.tried_rules >= budget or search.is_close():
            break
        search.try_rules(rules)
    search.improve(budget)
    return search.result()


class _Search:
    """What has been tried, and the best of it."""

    def __init__(
        self,
        costs: Costs,
        count: int,
        homes: tuple[int, ...],
        network: Network,
        room: Room | None,
        bound: float,
    ) -> None:
        self.costs, self.count, self.homes = costs, count, homes
        self.network, self.room, self.bound = network, room, bound
        self.limits = _limits(count, homes, room)
        self.seen: dict[Rules, float] = {}
        self.fixed: dict[str, float] = {}
        self.best: tuple[float, str, Rules | None, Schedule] | None = None

    @property
    def tried_rules(self) -> int:
        return len(self.seen)

    def is_close(self) -> bool:
        """Whether nothing that could still be found would be worth it."""
        return self.best is not None and self.best[0] <= self.bound * (1 + _CLOSE)

    def try_fixed(self, split: bool) -> None:
        """All schedules with a fixed order that are for this placement."""
        stages, workers = len(self.homes), 1 + max(self.homes)
        for name, recipe in SCHEDULES.items():
            if name == "fitted" or (recipe.splits_backward and not split):
                continue
            if recipe.takes(stages, workers) and recipe.place(stages, workers) == self.homes:
                schedule = build(name, stages, self.count, num_workers=workers)
                seconds = self._consider(name, None, schedule)
                if seconds < math.inf:
                    self.fixed[name] = seconds

    def try_rules(self, rules: Rules) -> float:
        """The seconds of a step by these rules, infinite where there is no room."""
        if rules not in self.seen:
            schedule = build(
                "fitted",
                len(self.homes),
                self.count,
                costs=self.costs,
                placement=self.homes,
                rules=rules,
            )
            self.seen[rules] = self._consider("fitted", rules, schedule)
        return self.seen[rules]

    def improve(self, budget: int) -> None:
        """Change the best rules a little, as long as that helps."""
        moved = True
        while moved:
            best = min(self.seen, key=self.seen.__getitem__, default=None)
            if best is None:
                return
            moved = False
            for rules in _neighbours(best, self.limits):
                if self.tried_rules >= budget or self.is_close():
                    return
                if self.try_rules(rules) < self.seen[best]:
                    moved = True
                    break

    def result(self) -> Fit:
        """The fastest schedule that was tried.

        Raises:
            PlanError: none fits the room.
        """
        if self.best is None:
            raise PlanError(
                "no schedule fits in the memory for micro-batches in flight; give the workers "
                "more memory, cut the model elsewhere, or use smaller micro-batches"
            )
        seconds, name, rules, schedule = self.best
        tried = self.tried_rules + len(self.fixed)
        return Fit(name, rules, schedule, seconds, self.bound, self.fixed, tried)

    def _consider(self, name: str, rules: Rules | None, schedule: Schedule) -> float:
        timeline = simulate(schedule, self.costs.seconds, self.network)
        if self.room is not None:
            memory = memory_over_time(timeline, self.room.held, self.room.put_off)
            if any(m.peak > most for m, most in zip(memory, self.room.workers, strict=True)):
                return math.inf
        if self._is_better(timeline.seconds, schedule):
            self.best = timeline.seconds, name, rules, schedule
        return timeline.seconds

    def _is_better(self, seconds: float, schedule: Schedule) -> bool:
        """Faster than the best so far, or as fast while holding less."""
        if self.best is None or not math.isclose(seconds, self.best[0], rel_tol=_EQUAL):
            return self.best is None or seconds < self.best[0]
        return sum(check(schedule).in_flight) < sum(check(self.best[3]).in_flight)


def _limits(count: int, homes: Sequence[int], room: Room | None) -> tuple[int, ...]:
    """How many micro-batches every stage can hold if a worker's stages hold equally many.

    Raises:
        InputError: the room is for another number of stages or workers.
        PlanError: a worker cannot hold one.
    """
    if room is None:
        return (count,) * len(homes)
    workers = 1 + max(homes)
    if len(room.held) != len(homes) or len(room.workers) != workers:
        raise InputError(
            f"{len(homes)} stages on {workers} workers, but the room is for {len(room.held)} "
            f"stages and {len(room.workers)} workers"
        )
    each = [0.0] * workers
    for stage, worker in enumerate(homes):
        each[worker] += room.held[stage]
    most = [
        int(min(count, have / need)) if need else count
        for have, need in zip(room.workers, each, strict=True)
    ]
    if 0 in most:
        worker = most.index(0)
        raise PlanError(
            f"worker {worker} has {room.workers[worker]:.0f} bytes for micro-batches in flight, "
            f"but one takes {each[worker]:.0f}; use smaller micro-batches, or cut so that this "
            f"worker does less"
        )
    return tuple(most[worker] for worker in homes)


def _likely(search: _Search, split: bool) -> Iterator[Rules]:
    """Rules that are good for most pipelines, the best first."""
    several = len(set(search.homes)) < len(search.homes)
    halves = (True, False) if split and any(search.costs.weights) else (False,)
    for patience, depth, half in product(_PATIENCE, _DEPTHS, halves):
        lead = _lead(search, depth, half)
        for deepest_first in (True, False) if several else (True,):
            rules = Rules(search.limits, lead, patience, half, deepest_first)
            yield rules
            if not half:
                yield replace(rules, from_the_end=True)


def _lead(search: _Search, depth: float, split: bool) -> tuple[int, ...]:
    """For every stage, how many micro-batches it runs ahead so that gradients are back in time.

    One more than the slowest worker finishes in `depth` round trips from the stage to the last one
    and back; at most what the stage can hold.
    """
    costs = search.costs
    stages = range(costs.num_stages)
    backward = costs.by_kind[Kind.INPUT if split else Kind.BACKWARD]
    work = [0.0] * (1 + max(search.homes))
    for stage in stages:
        work[search.homes[stage]] += costs.forward[stage] + costs.backward[stage]
    pace = max(work)
    lead, trip = [1] * len(stages), 0.0
    for stage in reversed(stages[:-1]):
        trip += costs.forward[stage + 1] + backward[stage + 1]
        trip += 2 * sum(hops[stage] for hops in (costs.latency, costs.transfer) if hops)
        ahead = depth * trip / pace if trip else 0.0
        lead[stage] = 1 + math.ceil(min(ahead, float(search.limits[stage])) - 1e-9)
    return tuple(min(a, b) for a, b in zip(lead, search.limits, strict=True))


def _neighbours(rules: Rules, limits: Sequence[int]) -> Iterator[Rules]:
    """The rules with the lead of one stage changed, or of all stages up to it."""
    stages = range(len(limits))
    for step, stage, upto in product(_STEPS, stages, (False, True)):
        moved = range(stage + 1) if upto else (stage,)
        lead = tuple(
            min(max(lead + step * (s in moved), 0), limits[s]) for s, lead in enumerate(rules.lead)
        )
        yield replace(rules, lead=lead)
