"""What workers have noted in a pass, as a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from penstock.board.activity import EXCHANGING, Activity
from penstock.board.memory import Log
from penstock.schedule import Action, Event, Kind, Phase, Timeline

WAIT, TURN = "wait", "turn"

WORK = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input half",
    Kind.WEIGHT: "weight half",
}
"""What a worker does in an action of each kind, but for the parts that are noted by themselves."""


def title_of(action: Action) -> str:
    """An action in words, as traces name it."""
    return f"{WORK[action.kind]} {action.microbatch} in stage {action.stage}"


def phases_of(worker: int, log: Log, origin: int = 0) -> Iterator[Phase]:
    """What a worker did, in order; where it did nothing there is a gap.

    Args:
        worker: its number.
        log: of it. What its last entry begins has no end, and is left out.
        origin: the beginning of time, in nanoseconds of its clock.
    """
    at: Action | None = None
    for (start, code), (end, _) in pairwise(log):
        at = Activity.action_of(code) or at
        what = _what(code, at)
        if what:
            action = at if code > 0 else None
            yield Phase(worker, what, action, (start - origin) / 1e9, (end - origin) / 1e9)


def _what(code: int, at: Action | None) -> str:
    if code <= 0:
        return "exchange" if code == EXCHANGING else ""
    activity = Activity.of(code)
    if activity.waits:
        return TURN if activity.amid else WAIT
    if Activity.action_of(code) is not None and at is not None:
        return WORK[at.kind]
    return activity.what


def events_of(phases: Iterable[Phase]) -> list[Event]:
    """The actions that these phases of one worker are of, without the waits for their values."""
    events: list[Event] = []
    for worker, what, action, start, end in phases:
        if what == WAIT or action is None:
            continue
        if events and events[-1].action == action:
            events[-1] = events[-1]._replace(end=end)
        else:
            events.append(Event(worker, action, start, end))
    return events


def timeline_of(logs: Mapping[int, Log], num_workers: int, origin: int | None = None) -> Timeline:
    """What workers have noted in a pass.

    Args:
        logs: by number.
        num_workers: how many there are, idle ones included.
        origin: the beginning of time, in nanoseconds of the workers' clock; by default when the
            first of them began something.
    """
    if origin is None:
        origin = min((log[0][0] for log in logs.values() if log), default=0)
    phases = {worker: list(phases_of(worker, log, origin)) for worker, log in logs.items()}
    events = [event for own in phases.values() for event in events_of(own)]
    return Timeline(num_workers, events, [phase for own in phases.values() for phase in own])
