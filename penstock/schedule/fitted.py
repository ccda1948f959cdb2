"""Fitted: a schedule made for measured stages, which are never all equal.

A list scheduler. It runs the pipeline on a clock of its own and lets every worker that becomes
free start the best action that can start at that moment. What is best, how long to wait for
something better, and how much a stage may hold, are `Rules`; `penstock.plan.fit` searches for good
ones. The result is a function of the costs, the number of micro-batches, the placement and the
rules alone, so whoever knows them can build it again.

Three stages in halves, the middle one twice as slow as the others. It is the one that must not
wait, and it puts all its weight halves off to where the others have theirs:

    worker 0 | F0 F1 F2 F3 .. I0 W0 I1 W1 .. .. I2 W2 .. I3 W3 .. ..
    worker 1 | .. F0 F1 .. I0 F2 I1 F3 .. .. I2 .. .. I3 W0 W1 W2 W3
    worker 2 | .. .. F0 I0 F1 I1 W0 W1 F2 I2 W2 F3 I3 W3 .. .. .. ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

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
            has not sent on, and backwards from then on. Weight halves come last.
        patience: how long a worker waits for a better action that is on its way, as a share of the
            time of the action that it could start at once. With 0 it never waits if it can start.
        split: whether backwards come in halves.
        deepest_first: whether a worker with several stages prefers the forwards of the later ones,
            or those of the earlier ones.
        from_the_end: whether the clock runs backwards, from the end of the step to its start. Seen
            from its end, a step is that of a pipeline with forwards and backwards exchanged, and
            rules may give it a better schedule. Only with whole backwards.

    Raises:
        ScheduleError: a stage may hold nothing, the lengths differ, or halves from the end.
    """

    in_flight: tuple[int, ...]
    lead: tuple[int, ...]
    patience: float = 0.0
    split: bool = False
    deepest_first: bool = True
    from_the_end: bool = False

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
        if self.split and self.from_the_end:
            raise ScheduleError(
                "a weight half comes after its input half, which from the end is no longer so; "
                "give split or from_the_end, not both"
            )

    @classmethod
    def eager(cls, num_stages: int, *, split: bool = False) -> Rules:
        """As many in flight as eager 1F1B has."""
        depths = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
        return cls(depths, depths, split=split)


def fitted(
    costs: Costs, num_microbatches: int, placement: Sequence[int], rules: Rules | None = None
) -> Schedule:
    """The schedule that `rules` make of these costs.

    Args:
        costs: what every stage takes.
        num_microbatches: the number of micro-batches, `m`.
        placement: the worker of every stage, counted from 0.
        rules: what to prefer; by default what eager 1F1B does, as far as it can.

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
    if rules.from_the_end:
        mirrored = Costs(costs.backward, costs.forward, (), costs.latency, costs.transfer)
        lists = _Run(mirrored, num_microbatches, placement, rules).lists()
        lists = [_mirrored(actions, num_microbatches) for actions in lists]
    else:
        lists = _Run(costs, num_microbatches, placement, rules).lists()
    return Schedule("fitted", stages, num_microbatches, tuple(map(tuple, lists)))


def fitted_pass(
    costs: Costs,
    num_microbatches: int,
    placement: Sequence[int],
    rules: Rules,
    what: Literal["forward", "backward"],
) -> Schedule:
    """The order that `rules` make of a step's forwards alone, or of its backwards alone.

    All micro-batches wait at the first stage, or at the last one with their forwards done. Of its
    own stages a worker prefers those that come last on the way that micro-batches take, or, without
    `deepest_first`, first.

    Args:
        costs, num_microbatches, placement: as of `fitted`.
        rules: what to prefer; not from the end, and `lead` does not matter. `in_flight[s]` is how
            many micro-batches stage `s` may be ahead: of the forwards of the stage after it, or, in
            a pass of halved backwards, of its own weight halves.
        what: which part of a step.
    """
    lists = _Run(costs, num_microbatches, placement, rules, what).lists()
    return Schedule("fitted", costs.num_stages, num_microbatches, tuple(map(tuple, lists)))


def _mirrored(actions: Sequence[Action], num_microbatches: int) -> list[Action]:
    """The same from the end: last first, and every forward a backward."""
    other = {Kind.FORWARD: Kind.BACKWARD, Kind.BACKWARD: Kind.FORWARD}
    return [
        Action(other[kind], stage, num_microbatches - 1 - microbatch)
        for kind, stage, microbatch in reversed(actions)
    ]


class _Queue:
    """The actions of one kind on one stage: when each can start, and how many have."""

    def __init__(self, kind: Kind, stage: int, seconds: float) -> None:
        self.kind = kind
        self.stage = stage
        self.seconds = seconds
        self.come: list[float] = []  # the past and the known future
        self.started = 0


class _Run:
    """The list scheduler on a clock of its own: who is free when, and what has arrived."""

    def __init__(
        self,
        costs: Costs,
        num_microbatches: int,
        placement: Sequence[int],
        rules: Rules,
        what: Literal["step", "forward", "backward"] = "step",
    ) -> None:
        self.costs, self.placement, self.rules, self.what = costs, placement, rules, what
        backward = Kind.INPUT if rules.split else Kind.BACKWARD
        self.forwards = self._queues(Kind.FORWARD)
        self.backwards = self._queues(backward)
        # What gives memory back: the weight half, or the whole backward.
        self.releases = self._queues(Kind.WEIGHT) if rules.split else self.backwards
        first = self.backwards[-1] if what == "backward" else self.forwards[0]
        first.come = [0.0] * num_microbatches
        self.choices = [self._choices(worker) for worker in range(1 + max(placement))]
        self.links: dict[tuple[int, int], float] = {}
        # When a worker has to look what it can start: it is free again, or something has come.
        self.looks: list[tuple[float, int]] = []

    def _queues(self, kind: Kind) -> list[_Queue]:
        return [_Queue(kind, s, seconds) for s, seconds in enumerate(self.costs.by_kind[kind])]

    def _choices(self, worker: int) -> list[_Queue]:
        """What `worker` can do, in order of preference where the rules don't care."""
        own = [stage for stage, home in enumerate(self.placement) if home == worker]
        forwards = [self.forwards[stage] for stage in own]
        backwards = [self.backwards[stage] for stage in own]
        if self.rules.deepest_first:
            forwards.reverse()
        elif self.what == "backward":
            backwards.reverse()
        choices = [*backwards, *forwards]
        return choices + [self.releases[stage] for stage in own if self.rules.split]

    def lists(self) -> list[list[Action]]:
        """Every worker's list, once there is nothing left to look for."""
        lists: list[list[Action]] = [[] for _ in self.choices]
        free = [0.0] * len(lists)
        self.looks = [(0.0, worker) for worker in range(len(lists))]
        while self.looks:
            now, worker = heappop(self.looks)
            if free[worker] > now:
                continue
            queue = self._pick(worker, now)
            if queue is None:
                continue
            lists[worker].append(Action(queue.kind, queue.stage, queue.started))
            queue.started += 1
            if self.what == "forward" and queue.stage:  # the one before it has room again
                heappush(self.looks, (now, self.placement[queue.stage - 1]))
            end = free[worker] = now + queue.seconds
            heappush(self.looks, (end, worker))
            self._send(queue, end)
        return lists

    def _pick(self, worker: int, now: float) -> _Queue | None:
        """The best that `worker` can start now, unless something better is worth waiting for."""
        pick, rank, coming = None, 3, []
        for queue in self.choices[worker]:
            if queue.started == len(queue.come) or self._is_full(queue):
                continue
            own_rank = self._rank(queue)
            if own_rank >= rank:
                continue
            if queue.come[queue.started] <= now:
                pick, rank = queue, own_rank
            else:
                coming.append((own_rank, queue.come[queue.started]))
        if pick is None:
            return None
        limit = now + self.rules.patience * pick.seconds
        better = any(own_rank < rank and when <= limit for own_rank, when in coming)
        return None if better else pick

    def _is_full(self, queue: _Queue) -> bool:
        """Whether there is no room for what it would leave behind."""
        after = self._after(queue)
        return (
            after is not None and queue.started - after.started >= self.rules.in_flight[queue.stage]
        )

    def _after(self, queue: _Queue) -> _Queue | None:
        """What has to run before there is room for more of this queue's actions."""
        stage = queue.stage
        if self.what == "forward":
            return self.forwards[stage + 1] if stage + 1 < len(self.placement) else None
        if queue.kind is Kind.FORWARD:
            return self.releases[stage]
        halves = self.what == "backward" and queue.kind is Kind.INPUT
        return self.releases[stage] if halves else None

    def _rank(self, queue: _Queue) -> int:
        """0 for what the stage prefers, 1 for the other, 2 for weight halves."""
        if queue.kind is Kind.WEIGHT:
            return 2
        if self.what != "step":
            return 0
        stage = queue.stage
        leading = self.forwards[stage].started - self.backwards[stage].started
        prefers_forward = leading < self.rules.lead[stage]
        return int((queue.kind is Kind.FORWARD) != prefers_forward)

    def _send(self, queue: _Queue, end: float) -> None:
        """What an action that ends at `end` makes possible, here or where its result arrives."""
        stage = queue.stage
        if queue.kind is Kind.FORWARD:
            if stage + 1 < len(self.placement):
                self._arrive(self.forwards[stage + 1], stage, end)
            elif self.what == "step":
                self._arrive(self.backwards[stage], stage, end)
        elif queue.kind is not Kind.WEIGHT:
            if self.rules.split:
                self._arrive(self.releases[stage], stage, end)
            if stage:
                self._arrive(self.backwards[stage - 1], stage, end)

    def _arrive(self, queue: _Queue, source: int, end: float) -> None:
        """Over the link, if it is another worker's, as `penstock.simulate` has it."""
        link = self.placement[source], self.placement[queue.stage]
        if link[0] != link[1]:
            hop = min(source, queue.stage)
            if self.costs.transfer:
                end = max(end, self.links.get(link, 0.0)) + self.costs.transfer[hop]
                self.links[link] = end
            if self.costs.latency:
                end += self.costs.latency[hop]
            heappush(self.looks, (end, link[1]))
        queue.come.append(end)
