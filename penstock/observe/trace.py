"""Timelines in the format of Perfetto (https://perfetto.dev), to be looked at in a browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.files import save_whole
from penstock.schedule import Action, Event, Kind, Timeline

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input half",
    Kind.WEIGHT: "weight half",
}
_SEQUENCE = 1  # of packets: there is one writer


def save_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write timelines for https://ui.perfetto.dev, which reads the file in the browser.

    Every timeline is a process, every worker a track in it, and every action a slice, with its
    stage and micro-batch. Arrows lead from what sends values or gradients to what waits for them.

    Args:
        timelines: by name, such as `{"measured": timelines[0], "predicted": plan.timeline()}`;
            all begin at the same time.
        path: of the file, usually `step.pftrace`.

    Raises:
        PenstockError: the package perfetto is not installed, or the file cannot be written.
    """
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ModuleNotFoundError as error:
        raise PenstockError(
            "traces need the package perfetto: pip install 'penstock[trace]'"
        ) from error
    builder, numbers = TraceProtoBuilder(), count(1)
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        process = _track(builder, next(numbers), name=name, pid=pid)
        tracks = [
            _track(builder, next(numbers), name=f"worker {worker}", parent=process)
            for worker in range(timeline.num_workers)
        ]
        _add_slices(builder, timeline, tracks, numbers)
    save_whole(path, builder.serialize(), "trace")


def _track(builder: Any, number: int, *, name: str, pid: int = 0, parent: int = 0) -> int:
    """Add a track, which is a process if it has a `pid`; returns its number."""
    descriptor = builder.add_packet().track_descriptor
    descriptor.uuid = number
    if pid:
        descriptor.process.pid = pid
        descriptor.process.process_name = name
    else:
        descriptor.parent_uuid = parent
        descriptor.name = name
        descriptor.sibling_order_rank = number
        # tracks are shown in the order of workers
    return number


def _add_slices(
    builder: Any, timeline: Timeline, tracks: list[int], numbers: Iterator[int]
) -> None:
    """Add a slice for every event, in the order in which things happen on each track."""
    flows: dict[tuple[Action, Action], int] = {}
    there = {event.action for event in timeline.events}
    for event in sorted(timeline.events, key=lambda e: (e.worker, e.start)):
        begin = _event(builder, event.start, tracks[event.worker])
        begin.type = begin.TYPE_SLICE_BEGIN
        kind, stage, microbatch = event.action
        begin.name = f"{_NAMES[kind]} {microbatch} in stage {stage}"
        begin.categories.append(_NAMES[kind])
        for name, value in (("stage", stage), ("micro-batch", microbatch)):
            note = begin.debug_annotations.add()
            note.name, note.int_value = name, value
        for pair in _arrows(event, there):
            begin.flow_ids.append(flows.setdefault(pair, next(numbers)))
        end = _event(builder, event.end, tracks[event.worker])
        end.type = end.TYPE_SLICE_END


def _event(builder: Any, seconds: float, track: int) -> Any:
    packet = builder.add_packet()
    packet.timestamp = round(1e9 * seconds)
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_event.track_uuid = track
    return packet.track_event


def _arrows(event: Event, there: set[Action]) -> Iterator[tuple[Action, Action]]:
    """From what sends to what waits for it, where this event is one of the two."""
    kind, stage, microbatch = action = event.action
    if kind is Kind.WEIGHT:  # nobody waits for it, and it waits for nobody
        return
    step = 1 if kind is Kind.FORWARD else -1
    before, after = (Action(kind, stage + way, microbatch) for way in (-step, step))
    if before in there:
        yield before, action
    if after in there:
        yield action, after
