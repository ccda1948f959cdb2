"""The event simulator: when everything would happen if the durations were these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import InputError
from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.timeline import Event, Timeline
from penstock.schedule.walk import placement, walk


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    latency: Sequence[float] = (),
) -> Timeline:
    """Runs `schedule` on a clock of its own.

    A worker runs its list in order. An action starts as soon as its worker is free and what it
    waits for has arrived; sends cost the sender nothing and overlap with its next action.

    Args:
        schedule: one that `penstock.schedule.check` accepts.
        seconds: how long an action takes, asked once per action.
        latency: `latency[s]` is the one-way seconds between stages `s` and `s+1`, for activations
            and for gradients. It is not paid where both are on one worker. Empty means none.

    Returns:
        A timeline whose events carry the start and end of every action, in seconds.

    Raises:
        InputError: `latency` is neither empty nor one number per pair of neighbouring stages.
        ScheduleError: the schedule deadlocks.
    """
    hops = _hops(schedule, latency)
    down, up = (*hops, 0.0), (0.0, *hops)
    forward = Kind.FORWARD
    free = [0.0] * len(schedule.workers)
    # A micro-batch is in one place at a time, so one clock each is enough: when the result of its
    # last action reaches the worker of the next one.
    arrival = [0.0] * schedule.num_microbatches
    events = []
    for worker, action in walk(schedule):
        kind, stage, microbatch = action
        start = max(free[worker], arrival[microbatch])
        end = start + seconds(action)
        free[worker] = end
        arrival[microbatch] = end + (down[stage] if kind is forward else up[stage])
        events.append(Event(worker, action, start, end))
    return Timeline(len(schedule.workers), events)


def _hops(schedule: Schedule, latency: Sequence[float]) -> tuple[float, ...]:
    """`hops[s]`: the seconds that really pass between stages `s` and `s+1`."""
    links = schedule.num_stages - 1
    if len(latency) not in (0, links):
        raise InputError(
            f"{schedule.num_stages} stages have {links} links between them, "
            f"but latency has {len(latency)} entries; give one per link, or none"
        )
    homes = placement(schedule)
    return tuple(
        0.0 if not len(latency) or homes[stage] == homes[stage + 1] else float(latency[stage])
        for stage in range(links)
    )
