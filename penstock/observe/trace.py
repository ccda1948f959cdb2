"""Timelines in the format of Perfetto (https://perfetto.dev), to be looked at in a browser."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from penstock.board.phases import TURN, WAIT, WORK, title_of
from penstock.errors import PenstockError
from penstock.files import save_whole
from penstock.plan.plan import Plan
from penstock.schedule import Action, Event, Kind, Phase, Timeline

_PARTS = {
    "loss": "loss",
    "recomputation": "recomputation",
    "send": "send",
    TURN: "wait for other replicas",
}
"""Phases that are parts of an action, and the names of their slices."""
_SEQUENCE = 1  # of packets: there is one writer

_Place = tuple[int, Action]
"""An action of a replica; several may run the same."""


@dataclass(frozen=True)
class RecordedTimeline(Timeline):
    """What was recorded of a pass: a timeline that can be saved.

    Attributes:
        plan: by which it ran.
    """

    plan: Plan = field(kw_only=True, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it for https://ui.perfetto.dev; an existing file is replaced in one move.

        What the plan predicts is shown below, if the pass was a step of training. See
        `penstock.observe.trace.save_trace`, which also writes several timelines into one file.

        Args:
            path: of the file, usually `step.pftrace`.

        Raises:
            InputError: it cannot be written there.
            PenstockError: the package perfetto is not installed.
        """
        timelines: dict[str, Timeline] = {"measured": self}
        kinds = {event.action.kind for event in self.events}
        if Kind.FORWARD in kinds and len(kinds) > 1:
            timelines["predicted"] = self.plan.timeline()
        save_trace(timelines, path, self.plan)


def save_trace(
    timelines: Mapping[str, Timeline],
    path: str | os.PathLike[str],
    plan: Plan | None = None,
) -> None:
    """Write timelines for https://ui.perfetto.dev, which reads the file in the browser.

    Every timeline is a process, every worker a track in it, and every action a slice, with its
    stage and micro-batch. Arrows lead from what sends values or gradients to what waits for them.
    Below a worker's track there is a counter of the micro-batches that it holds. In a timeline with
    phases, parts of actions are slices within, and waits are slices between them.

    Args:
        timelines: by name, such as `{"measured": timelines[0], "predicted": plan.timeline()}`;
            all begin at the same time.
        path: of the file, usually `step.pftrace`.
        plan: by which they ran. With it, slices name the first and the last call of their stage,
            and there are counters of the bytes that are held for micro-batches.

    Raises:
        PenstockError: the package perfetto is not installed, or the file cannot be written.
    """
    require_perfetto()
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder, numbers = TraceProtoBuilder(), count(1)
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        _Process(builder, numbers, plan, name, pid).add(timeline)
    save_whole(path, builder.serialize(), "trace")


def require_perfetto() -> None:
    """Raise if there can be no traces, before the work that they would show.

    Raises:
        PenstockError: the package perfetto is not installed.
    """
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except ModuleNotFoundError as error:
        raise PenstockError(
            "traces need the package perfetto: pip install 'penstock[trace]'"
        ) from error


class _Slice(NamedTuple):
    """What is shown from `start` to `end`, in seconds, with what is shown within it."""

    start: float
    end: float
    name: str
    category: str
    action: Action | None = None
    flows: Sequence[int] = ()
    parts: Sequence[_Slice] = ()


class _Process:
    """One timeline in a trace.

    Args:
        builder: the `TraceProtoBuilder` of the whole trace.
        numbers: yields unique ids for tracks and arrows; shared by all timelines of the trace.
        plan: the plan by which it ran; `None` if it is not known.
        name: the name of the timeline.
        pid: the process id that stands for this timeline in the trace.
    """

    def __init__(
        self, builder: Any, numbers: Iterator[int], plan: Plan | None, name: str, pid: int
    ) -> None:
        self._builder, self._numbers, self._plan = builder, numbers, plan
        self._flows: dict[tuple[_Place, _Place], int] = {}
        self._uuid = self._track(name, pid=pid)

    def add(self, timeline: Timeline) -> None:
        """Add its workers, in the order in which things happen on each track."""
        ran = {(self._replica(e.worker), e.action): e.worker for e in timeline.events}
        phases: dict[tuple[int, Action | None], list[Phase]] = {}
        for phase in timeline.phases:
            phases.setdefault((phase.worker, phase.action), []).append(phase)
        tracks = [
            self._track(f"worker {worker}", parent=self._uuid)
            for worker in range(timeline.num_workers)
        ]
        for worker, track in enumerate(tracks):
            events = sorted((e for e in timeline.events if e.worker == worker), key=_start)
            between = [p for p in timeline.phases if p.worker == worker and _is_between(p)]
            slices = [self._event(event, ran, phases) for event in events]
            slices += [self._between(phase, ran) for phase in between]
            for each in sorted(slices, key=_start):
                self._add(each, track)
            self._count(worker, events, track)

    def _replica(self, worker: int) -> int:
        return worker // self._plan.workers_per_replica if self._plan is not None else 0

    # -- slices -------------------------------------------------------------------------------

    def _event(
        self,
        event: Event,
        ran: Mapping[_Place, int],
        phases: Mapping[tuple[int, Action | None], Sequence[Phase]],
    ) -> _Slice:
        """An action, with its parts."""
        worker, action, start, end = event
        place = self._replica(worker), action
        parts = [
            _Slice(phase.start, phase.end, _PARTS[phase.what], phase.what)
            for phase in phases.get((worker, action), ())
            if phase.what in _PARTS and start <= phase.start and phase.end <= end
        ]
        flows = [self._flows.setdefault(pair, next(self._numbers)) for pair in _arrows(place, ran)]
        return _Slice(start, end, title_of(action), WORK[action.kind], action, flows, parts)

    def _between(self, phase: Phase, ran: Mapping[_Place, int]) -> _Slice:
        """A wait for values, or an exchange with other replicas."""
        worker, what, action, start, end = phase
        name = what
        if what == WAIT and action is not None:
            other = ran.get((self._replica(worker), _awaited(action)))
            if other is not None and other != worker:
                name = f"wait for worker {other}"
        return _Slice(start, end, name, what, action)

    def _add(self, each: _Slice, track: int) -> None:
        """Add a slice, and those within it."""
        begin = self._packet(each.start, track)
        begin.type = begin.TYPE_SLICE_BEGIN
        begin.name = each.name
        begin.categories.append(each.category)
        if each.action is not None:
            self._annotate(begin, each.action)
        begin.flow_ids.extend(each.flows)
        for part in each.parts:
            self._add(part, track)
        end = self._packet(each.end, track)
        end.type = end.TYPE_SLICE_END

    def _annotate(self, begin: Any, action: Action) -> None:
        """Add what is shown of an action when its slice is selected."""
        for name, value in (("stage", action.stage), ("micro-batch", action.microbatch)):
            note = begin.debug_annotations.add()
            note.name, note.int_value = name, value
        if self._plan is not None:
            stage = self._plan.stages[action.stage]
            for name, text in (("first call", stage.first), ("last call", stage.last)):
                note = begin.debug_annotations.add()
                note.name, note.string_value = name, text

    # -- counters -----------------------------------------------------------------------------

    def _count(self, worker: int, events: Iterable[Event], track: int) -> None:
        """Add counters of what a worker holds: micro-batches, and their bytes if that is known."""
        changes = list(_changes(events))
        held = self._track("micro-batches held", parent=track, unit="UNIT_COUNT")
        self._counter(held, ((when, sign) for when, _, sign in changes))
        if self._plan is not None:
            stages = self._plan.stages_of(self._replica(worker))
            size = self._track("bytes held", parent=track, unit="UNIT_SIZE_BYTES")
            self._counter(size, ((t, sign * stages[s].held_bytes) for t, s, sign in changes))

    def _counter(self, track: int, changes: Iterable[tuple[float, int]]) -> None:
        """Add a counter's values, one for each moment at which it changes."""
        by_time: dict[float, int] = {}
        for when, change in changes:
            by_time[when] = by_time.get(when, 0) + change
        value = 0
        for when in sorted(by_time):
            value += by_time[when]
            event = self._packet(when, track)
            event.type = event.TYPE_COUNTER
            event.counter_value = value

    # -- packets ------------------------------------------------------------------------------

    def _track(self, name: str, *, pid: int = 0, parent: int = 0, unit: str = "") -> int:
        """Add a track: a process if it has a `pid`, a counter if it has a `unit`."""
        number = next(self._numbers)
        descriptor = self._builder.add_packet().track_descriptor
        descriptor.uuid = number
        descriptor.child_ordering = descriptor.EXPLICIT
        if pid:
            descriptor.process.pid = pid
            descriptor.process.process_name = name
            return number
        descriptor.parent_uuid, descriptor.name = parent, name
        descriptor.sibling_order_rank = number  # tracks are shown in the order of workers
        if unit:
            descriptor.counter.unit = getattr(descriptor.counter, unit)
        return number

    def _packet(self, seconds: float, track: int) -> Any:
        packet = self._builder.add_packet()
        packet.timestamp = round(1e9 * seconds)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.track_uuid = track
        return packet.track_event


def _start(each: Event | _Slice) -> float:
    return each.start


def _is_between(phase: Phase) -> bool:
    """Whether it is no part of an action."""
    return phase.what == WAIT or phase.action is None


def _changes(events: Iterable[Event]) -> Iterator[tuple[float, int, int]]:
    """Yields `(seconds, stage, change)`: 1 as a micro-batch begins to be held, -1 as that ends.

    It holds one from the start of its forward to the end of its backward, or of its weight half.
    """
    begun: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}
    for event in events:
        kind, stage, microbatch = event.action
        if kind is Kind.FORWARD:
            begun.setdefault((stage, microbatch), event.start)
        else:
            ended[stage, microbatch] = event.end
    for place, start in begun.items():
        yield start, place[0], 1
        if place in ended:
            yield ended[place], place[0], -1


def _awaited(action: Action) -> Action:
    """The action whose values or gradients this one needs; its stage may not exist."""
    kind, stage, microbatch = action
    return Action(kind, stage + (-1 if kind is Kind.FORWARD else 1), microbatch)


def _arrows(place: _Place, ran: Mapping[_Place, int]) -> Iterator[tuple[_Place, _Place]]:
    """From what sends to what waits for it, where this action is one of the two."""
    replica, action = place
    kind, stage, microbatch = action
    if kind is Kind.WEIGHT:  # nobody waits for it, and it waits for nobody
        return
    before = replica, _awaited(action)
    after = replica, Action(kind, 2 * stage - before[1].stage, microbatch)
    if before in ran:
        yield before, place
    if after in ran:
        yield place, after
