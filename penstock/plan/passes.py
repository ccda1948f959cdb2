"""The order of a pass of forwards alone, or of backwards alone, as the plain style has them.

A schedule is made for steps, in which forwards and backwards take turns. If a worker has several
stages, or halves of backwards, what is left of such an order may take clearly longer than need be:
the stages were to wait for each other at other moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.plan.decisions import Decisions
from penstock.schedule import Kind, Rules, Schedule, fitted_pass
from penstock.simulate import Network, Simulator

_PATIENCE = (0.0, 0.3, 0.6, 1.0)
_WORTH = 0.99
"""Another order has to take less than this share of the time of the schedule's own.

Both are predicted from a profile, which has some noise.
"""


def schedule_of_pass(
    plan: Decisions, num_microbatches: int, what: Literal["forward", "backward"]
) -> Schedule:
    """What every worker of a replica runs in such a pass, in order.

    That is the order of the plan's schedule, unless a list scheduler finds one that is clearly
    faster for the stages of the first replica. It is a function of the arguments alone, so that
    workers in different processes find the same.

    Args:
        plan: whose stages they are.
        num_microbatches: that the replica runs.
        what: whether it has the forwards or the backwards.
    """
    whole = plan.schedule_for(num_microbatches)
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
    least, best = _WORTH * _seconds(plan, own, is_forward), own
    for other in _others(plan, num_microbatches, what):
        seconds = _seconds(plan, other, is_forward)
        if seconds < least:
            least, best = seconds, other
    return best


def _others(
    plan: Decisions, num_microbatches: int, what: Literal["forward", "backward"]
) -> Iterator[Schedule]:
    """Other orders; none if a worker has nothing to choose from."""
    split = what == "backward" and plan.splits_backward
    stages, workers = len(plan.stages), plan.workers_per_replica
    most = (num_microbatches,) * stages
    for deepest_first in (True, False) if stages > workers else (True,) if split else ():
        for patience in _PATIENCE if split else (0.0,):
            rules = Rules(most, most, patience, split, deepest_first)
            yield fitted_pass(plan.costs, num_microbatches, plan.placement, rules, what)


def _seconds(plan: Decisions, schedule: Schedule, is_forward: bool) -> float:
    """The predicted seconds of such a pass."""
    costs = plan.costs
    simulator = Simulator(schedule, is_forward)
    durations = [costs.seconds(action) for action in simulator.actions]
    network = Network.of(costs, overlap=plan.overlap, overhead=plan.overhead_seconds)
    return max(simulator.times(durations, network)[1])
