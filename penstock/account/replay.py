"""Simulates recorded actions again, in the same order but with other durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule import Action, Kind

WorkerAction = tuple[int, Action]
"""An action of a worker: several replicas run the same actions on other workers."""


@dataclass(frozen=True)
class Durations:
    """How long everything takes, in seconds.

    Attributes:
        work: the duration of every action.
        delays: for actions that need another worker's values, the time from sending these until
            they have arrived; 0 for actions that are missing.
    """

    work: Mapping[WorkerAction, float]
    delays: Mapping[WorkerAction, float] = field(default_factory=dict)


class Replay:
    """The actions of one pass, and which of them need the values of which other.

    Args:
        lists: for every worker its actions, in the order in which it ran them.
        workers_per_replica: the number of workers of each replica; worker numbers are replica by
            replica.

    Attributes:
        before: for every action the one of a neighbouring stage whose values it needs, on the same
            worker or another.
    """

    def __init__(self, lists: Sequence[Sequence[Action]], workers_per_replica: int) -> None:
        self.lists = lists
        self._of = workers_per_replica
        ran = {
            (worker // self._of, kind is Kind.FORWARD, stage, microbatch): (worker, action)
            for worker, actions in enumerate(lists)
            for action in actions
            for kind, stage, microbatch in [action]
            if kind is not Kind.WEIGHT
        }
        self.before: dict[WorkerAction, WorkerAction] = {}
        for worker, actions in enumerate(lists):
            for action in actions:
                kind, stage, microbatch = action
                is_forward = kind is Kind.FORWARD
                other = stage - 1 if is_forward else stage + 1
                found = ran.get((worker // self._of, is_forward, other, microbatch))
                if kind is not Kind.WEIGHT and found is not None:
                    self.before[worker, action] = found

    def seconds(self, durations: Durations) -> float:
        """How long it would take until the last action ends.

        Raises:
            ScheduleError: workers would wait for each other for ever.
        """
        ends: dict[WorkerAction, float] = {}
        free = [0.0] * len(self.lists)
        at = [0] * len(self.lists)
        left = sum(map(len, self.lists))
        while left:
            was = left
            for worker, actions in enumerate(self.lists):
                while at[worker] < len(actions):
                    place = worker, actions[at[worker]]
                    start = free[worker]
                    if (other := self.before.get(place)) is not None:
                        if other not in ends:
                            break
                        there = ends[other]
                        if other[0] != worker:
                            there += durations.delays.get(place, 0.0)
                        start = max(start, there)
                    free[worker] = ends[place] = start + durations.work[place]
                    at[worker] += 1
                    left -= 1
            if left == was:
                raise ScheduleError("the recorded actions wait for each other for ever")
        return max(free, default=0.0)

    def work(self, durations: Durations) -> list[float]:
        """The seconds that every worker would work."""
        return [
            sum(durations.work[worker, action] for action in actions)
            for worker, actions in enumerate(self.lists)
        ]
