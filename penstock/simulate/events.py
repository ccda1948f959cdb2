"""The event simulator: when everything would happen, with these durations and this network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import InputError
from penstock.schedule.actions import Action, Event, Kind, Schedule, Timeline
from penstock.schedule.costs import Costs, check_hops
from penstock.schedule.walk import placement, walk


@dataclass(frozen=True)
class Network:
    """The links between neighbouring stages, in seconds.

    What a stage sends first waits until the link is free, occupies it for its `transfer`, and
    arrives `latency` later. A link leads from one worker to another, in one direction: everything
    that the first sends to the second shares it, first in, first out, whichever stages it goes
    between; what goes the other way has a link of its own. Stages of one worker need no link.

    Attributes:
        latency: `latency[s]` is the one-way seconds between stages `s` and `s+1`. Empty means none.
        transfer: `transfer[s]` is the seconds that an activation from stage `s` to `s+1`, or its
            gradient on the way back, occupies the link. Empty means none.
        overlap: whether a worker goes on to its next action while it sends; if not, it is busy
            until the link has taken everything.
        overhead: the seconds that a worker spends on every action besides its work.

    Raises:
        InputError: a time is negative.
    """

    latency: Sequence[float] = ()
    transfer: Sequence[float] = ()
    overlap: bool = True
    overhead: float = 0.0

    def __post_init__(self) -> None:
        least = min((*self.latency, *self.transfer, self.overhead))
        if least < 0:
            raise InputError(f"times are seconds and cannot be negative, got {least}")

    @classmethod
    def of(cls, costs: Costs, *, overlap: bool = True, overhead: float = 0.0) -> Network:
        """The links with the latencies and transfers of these costs."""
        return cls(costs.latency, costs.transfer, overlap, overhead)

    def check(self, num_stages: int) -> None:
        """Raise unless it links `num_stages` stages.

        Raises:
            InputError: the number of latencies or of transfers does not fit.
        """
        check_hops("latency", self.latency, num_stages)
        check_hops("transfer", self.transfer, num_stages)


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    network: Network | Sequence[float] = (),
) -> Timeline:
    """Runs `schedule` on a clock of its own.

    A worker runs its list in order. An action starts as soon as its worker is free and what it
    waits for has arrived. About a microsecond and a half per action.

    Args:
        schedule: one that `penstock.schedule.check` accepts.
        seconds: how long an action takes, asked once per action.
        network: the links between stages, or only their latencies, one per pair of neighbouring
            stages; empty means that they cost nothing.

    Returns:
        A timeline whose events carry the start and end of every action, in seconds.

    Raises:
        InputError: the latencies or transfers are not one per pair of neighbouring stages.
        ScheduleError: the schedule deadlocks.
    """
    if not isinstance(network, Network):
        network = Network(network)
    simulator = Simulator(schedule)
    durations = [seconds(action) for action in simulator.actions]
    starts, ends = simulator.times(durations, network)
    events = map(Event, simulator.on, simulator.actions, starts, ends)
    return Timeline(len(schedule.workers), list(events))


class Simulator:
    """One schedule, to be run with many durations: the order of its actions is found once.

    Args:
        schedule: one that `penstock.schedule.check` accepts, or a part of one, as of `walk`.
        forwards: as of `walk`.

    Attributes:
        schedule: as given.
        actions: all of them, in an order in which a single thread could run them.
        on: the worker of each.

    Raises:
        ScheduleError: the schedule deadlocks.
    """

    def __init__(self, schedule: Schedule, forwards: bool = True) -> None:
        self.schedule = schedule
        steps = list(walk(schedule, forwards))
        self.on = [worker for worker, _ in steps]
        self.actions = [action for _, action in steps]
        last = 2 * schedule.num_stages - 1
        self._steps = [
            (worker, _position(action, last), action.microbatch) for worker, action in steps
        ]

    def times(
        self, durations: Sequence[float], network: Network
    ) -> tuple[list[float], list[float]]:
        """When every action starts and ends, in the order of `actions`.

        Args:
            durations: seconds, in the same order.
            network: the links between stages.

        Raises:
            InputError: the latencies or transfers are not one per pair of neighbouring stages.
        """
        schedule = self.schedule
        network.check(schedule.num_stages)
        hops = _hops(schedule, network)
        overhead, overlap = network.overhead, network.overlap
        free = [0.0] * len(schedule.workers)
        # A micro-batch is in one place at a time, so one clock each is enough: when the result of
        # its last action reaches the worker of the next one.
        arrival = [0.0] * schedule.num_microbatches
        # A link has one sender, and `walk` keeps every worker's order: first in, first out.
        taken = [0.0] * (1 + max(hop.link for hop in hops))
        starts: list[float] = []
        ends: list[float] = []
        for (worker, position, microbatch), seconds in zip(self._steps, durations, strict=True):
            start = free[worker]
            if position < 0:
                end = free[worker] = start + overhead + seconds
            else:
                ready = arrival[microbatch]
                if ready > start:
                    start = ready
                end = sent = start + overhead + seconds
                link, latency, transfer = hops[position]
                if link:
                    sent = (taken[link] if taken[link] > end else end) + transfer
                    taken[link] = sent
                free[worker] = end if overlap else sent
                arrival[microbatch] = sent + latency
            starts.append(start)
            ends.append(end)
        return starts, ends


def _position(action: Action, last: int) -> int:
    """Where an action is on its micro-batch's path; -1 if it is not on it."""
    if action.kind is Kind.WEIGHT:
        return -1
    return action.stage if action.kind is Kind.FORWARD else last - action.stage


class _Hop(NamedTuple):
    """Where a micro-batch goes after an action: over which link, and in how many seconds.

    Link 0 is none: the micro-batch stays on its worker.
    """

    link: int
    latency: float
    transfer: float


def _hops(schedule: Schedule, network: Network) -> list[_Hop]:
    """The hop after every action of a micro-batch's path: forwards down, then backwards up."""
    stages = schedule.num_stages
    homes = placement(schedule)
    stay = _Hop(0, 0.0, 0.0)
    links: dict[tuple[int, int], int] = {}

    def hop(source: int, target: int) -> _Hop:
        pair = homes[source], homes[target]
        if pair[0] == pair[1]:
            return stay
        between = min(source, target)
        return _Hop(
            links.setdefault(pair, len(links) + 1),
            float(network.latency[between]) if len(network.latency) else 0.0,
            float(network.transfer[between]) if len(network.transfer) else 0.0,
        )

    down = [hop(stage, stage + 1) for stage in range(stages - 1)]
    up = [hop(stage, stage - 1) for stage in range(stages - 1, 0, -1)]
    return [*down, stay, *up, stay]
