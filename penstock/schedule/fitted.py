"""Fitted: a schedule made for measured stages, which are never all equal.

A list scheduler. It runs the pipeline on a clock of its own and lets every worker that becomes
free start the best action that can start at that moment, so no worker waits while it has work. What
is best, and how much a stage may hold, are `Rules`; `penstock.plan.fit` searches for good ones. The
result is a function of the costs, the number of micro-batches, the placement and the rules alone.

Three stages, the middle one twice as slow (in halves of a second, `F` 1 and `B` 2, the middle one
2 and 4), never wait for each other in the middle:

    worker 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
    worker 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
    worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.costs import Costs


@dataclass(frozen=True)
class Rules:
    """What a worker prefers when it can choose.

    Attributes:
        in_flight: `in_flight[s]` is the most micro-batches that stage `s` may hold, their forward
            done and their backward, or its weight half, not.
        lead: stage `s` prefers forwards until it holds `lead[s]` micro-batches whose gradients it
            has not sent on, and backwards from then on.
        split: whether backwards come in halves, the weight halves wherever there is nothing else
            to do.
        deepest_first: whether a worker with several stages prefers the forwards of the later ones,
            or those of the earlier ones.

    Raises:
        ScheduleError: a stage may hold nothing, or the lengths differ.
    """

    in_flight: tuple[int, ...]
    lead: tuple[int, ...]
    split: bool = False
    deepest_first: bool = True

    def __post_init__(self) -> None:
        if len(self.in_flight) != len(self.lead):
            raise ScheduleError(
                f"in_flight has {len(self.in_flight)} entries and lead {len(self.lead)}; "
                f"give one of each per stage"
            )
        if min(self.in_flight, default=1) < 1:
            raise ScheduleError(
                f"in_flight={self.in_flight}: every stage must be able to hold one micro-batch"
            )

    @classmethod
    def eager(cls, num_stages: int, *, split: bool = False) -> Rules:
        """As many in flight as eager 1F1B has."""
        depths = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        return cls(depths, depths, split)


def fitted(
    costs: Costs, num_microbatches: int, placement: Sequence[int], rules: Rules | None = None
) -> Schedule:
    """The schedule that `rules` make of these costs.

    Args:
        costs: what every stage takes.
        num_microbatches: the number of micro-batches, `m`.
        placement: the worker of every stage, counted from 0.
        rules: what to prefer; by default backwards, with as many in flight as eager 1F1B has.

    Raises:
        ScheduleError: the placement or the rules are not for as many stages as the costs.
    """
    stages = costs.num_stages
    rules = rules or Rules.eager(stages)
    if len(placement) != stages or len(rules.lead) != stages:
        raise ScheduleError(
            f"the costs are of {stages} stages, but placement has {len(placement)} entries and "
            f"the rules have {len(rules.lead)}; give one per stage"
        )
    workers = _Run(costs, num_microbatches, placement, rules).workers()
    return Schedule("fitted", stages, num_microbatches, workers)


class _Run:
    """One run of the list scheduler. Everything is in lists, by stage or by worker."""

    def __init__(
        self, costs: Costs, num_microbatches: int, placement: Sequence[int], rules: Rules
    ) -> None:
        stages = costs.num_stages
        self.costs, self.placement, self.rules = costs, placement, rules
        self.split = rules.split
        self.own: list[list[int]] = [[] for _ in range(1 + max(placement))]
        for stage in range(stages):
            self.own[placement[stage]].append(stage)
        # How many forwards and backwards every stage could have started by now, and has started.
        self.forwards_came = [num_microbatches] + [0] * (stages - 1)
        self.forwards = [0] * stages
        self.backwards_came = [0] * stages
        self.backwards = [0] * stages
        self.freed = [0] * stages if self.split else self.backwards
        self.lists: list[list[Action]] = [[] for _ in self.own]
        self.links: dict[tuple[int, int], float] = {}
        # What will happen: when, a number that keeps equal times in order, the worker, and the
        # list and its place to count up at an arrival, or None when the worker becomes free.
        self.events: list[tuple[float, int, int, list[int] | None, int]] = []

    def workers(self) -> tuple[tuple[Action, ...], ...]:
        """Every worker's list, once nothing happens any more."""
        events = self.events
        now, touched = 0.0, set(range(len(self.own)))
        free = [True] * len(self.own)
        while True:
            for worker in sorted(touched):
                if free[worker] and (action := self._choice(worker)):
                    free[worker] = False
                    self._start(worker, action, now)
            if not events:
                return tuple(map(tuple, self.lists))
            now = events[0][0]
            touched.clear()
            while events and events[0][0] == now:
                _, _, worker, counts, stage = heappop(events)
                touched.add(worker)
                if counts is None:
                    free[worker] = True
                else:
                    counts[stage] += 1

    def _choice(self, worker: int) -> Action | None:
        """The best action that `worker` can start now: by the rules, or else any weight half."""
        rules, own = self.rules, self.own[worker]
        forward = backward = None
        for stage in own:
            ahead = self.forwards[stage]
            if (
                ahead < self.forwards_came[stage]
                and ahead - self.freed[stage] < rules.in_flight[stage]
                and (forward is None or rules.deepest_first)
            ):
                forward = stage
            if backward is None and self.backwards[stage] < self.backwards_came[stage]:
                backward = stage
        if forward is not None:
            held = self.forwards[forward] - self.backwards[forward]
            if backward is None or held < rules.lead[forward]:
                return Action(Kind.FORWARD, forward, self.forwards[forward])
        if backward is not None:
            kind = Kind.INPUT if self.split else Kind.BACKWARD
            return Action(kind, backward, self.backwards[backward])
        for stage in own:
            if self.freed[stage] < self.backwards[stage]:
                return Action(Kind.WEIGHT, stage, self.freed[stage])
        return None

    def _start(self, worker: int, action: Action, now: float) -> None:
        kind, stage, _ = action
        self.lists[worker].append(action)
        end = now + self.costs.seconds(action)
        self._expect(end, worker, None, 0)
        if kind is Kind.WEIGHT:
            self.freed[stage] += 1
        elif kind is Kind.FORWARD:
            self.forwards[stage] += 1
            if stage + 1 < len(self.placement):
                self._send(end, stage, stage + 1, self.forwards_came)
            else:
                self._expect(end, worker, self.backwards_came, stage)
        else:
            self.backwards[stage] += 1
            if stage:
                self._send(end, stage, stage - 1, self.backwards_came)

    def _send(self, end: float, source: int, target: int, counts: list[int]) -> None:
        """What `source` has made reaches `target`, as the simulator has it."""
        link = self.placement[source], self.placement[target]
        if link[0] != link[1]:
            hop = min(source, target)
            if self.costs.transfer:
                end = max(end, self.links.get(link, 0.0)) + self.costs.transfer[hop]
                self.links[link] = end
            if self.costs.latency:
                end += self.costs.latency[hop]
        self._expect(end, link[1], counts, target)

    def _expect(self, when: float, worker: int, counts: list[int] | None, stage: int) -> None:
        self._order += 1
        heappush(self.events, (when, self._order, worker, counts, stage))

    _order = 0
