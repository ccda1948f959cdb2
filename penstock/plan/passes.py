"""The order of a pass of forwards alone, or of backwards alone, as the plain style has them.

A schedule is made for steps, in which forwards and backwards take turns. If a worker has several
stages, or halves of backwards, what is left of such an order may take clearly longer than need be:
the stages were to wait for each other at other moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.plan.decisions import Decisions
from penstock.schedule import Kind, Rules, Schedule, check, fitted_pass
from penstock.simulate import Network, Simulator

_PATIENCE = (0.0, 0.3, 0.6, 1.0)
_WORTH = 0.99
"""An order has to take less than this share of the time of one before it, to be preferred.

Both are predicted from a profile, which has some noise. Orders that hold less come first.
"""


def schedule_of_pass(
    plan: Decisions, num_microbatches: int, what: Literal["forward", "backward"]
) -> Schedule:
    """What every worker of a replica runs in such a pass, in order.

    That is the order of the plan's schedule, unless a list scheduler finds one that is clearly
    faster for the stages of the first replica. In that one no stage is further ahead than it may be
    in a step, so that values which wait for other stages, or for weight halves, do not take more
    memory. It is a function of the arguments alone: workers in different processes find the same.

    Args:
        plan: whose stages they are.
        num_microbatches: that the replica runs.
        what: whether it has the forwards or the backwards.

    Raises:
        ScheduleError: the plan's schedule is not sound.
    """
    whole = plan.schedule_for(num_microbatches)
    ahead = check(whole).in_flight
    is_forward = what == "forward"
    own = Schedule(
        whole.name,
        whole.num_stages,
        num_microbatches,
        tuple(
            tuple(action for action in actions if (action.kind is Kind.FORWARD) is is_forward)
            for actions in whole.workers
        ),
    )
    least, best = _seconds(plan, own, is_forward), own
    for other in _others(plan, num_microbatches, what, ahead):
        seconds = _seconds(plan, other, is_forward)
        if seconds < _WORTH * least:
            least, best = seconds, other
    return best


def _others(
    plan: Decisions,
    num_microbatches: int,
    what: Literal["forward", "backward"],
    ahead: tuple[int, ...],
) -> Iterator[Schedule]:
    """Other orders than that of a step; none if a worker has nothing to choose from."""
    split = what == "backward" and plan.splits_backward
    several = len(plan.stages) > plan.workers_per_replica
    for deepest_first in (True, False) if several else (True,) if split else ():
        for patience in _PATIENCE if split else (0.0,):
            rules = Rules(ahead, ahead, patience, split, deepest_first)
            yield fitted_pass(plan.costs, num_microbatches, plan.placement, rules, what)


def _seconds(plan: Decisions, schedule: Schedule, is_forward: bool) -> float:
    """The predicted seconds of such a pass."""
    costs = plan.costs
    simulator = Simulator(schedule, is_forward)
    durations = [costs.seconds(action) for action in simulator.actions]
    network = Network.of(costs, overlap=plan.overlap, overhead=plan.overhead_seconds)
    return max(simulator.times(durations, network)[1])
