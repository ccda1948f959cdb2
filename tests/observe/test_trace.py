"""Timelines as Perfetto reads them."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent as Kinds

import penstock as ps
from penstock.observe.trace import save_trace
from penstock.schedule import Action, Event, Kind, Timeline, build
from penstock.simulate import simulate


def read(path: Path) -> tuple[dict[int, Any], dict[int, list[Any]]]:
    """Its tracks by number, and the packets of each in order."""
    trace, tracks, packets = Trace(), {}, defaultdict(list)
    trace.ParseFromString(path.read_bytes())
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        else:
            packets[packet.track_event.track_uuid].append(packet)
    return tracks, packets


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_every_action_is_a_slice_of_its_worker(schedule: str, tmp_path: Path) -> None:
    built = build(schedule, 4 if schedule == "interleaved" else 2, 4, num_workers=2)
    timeline = simulate(built, lambda action: 1.5 if action.kind is Kind.FORWARD else 2.5)
    assert timeline.num_workers == 2
    save_trace({"measured": timeline, "predicted": timeline}, tmp_path / "a.pftrace")
    tracks, packets = read(tmp_path / "a.pftrace")
    processes = [t for t in tracks.values() if t.HasField("process")]
    assert [t.process.process_name for t in processes] == ["measured", "predicted"]
    workers = [t for t in tracks.values() if t.parent_uuid == processes[0].uuid]
    assert [t.name for t in workers] == ["worker 0", "worker 1"]
    for worker, track in enumerate(workers):
        own = packets[track.uuid]
        begins, ends = own[::2], own[1::2]
        assert {p.track_event.type for p in begins} == {Kinds.TYPE_SLICE_BEGIN}
        assert {p.track_event.type for p in ends} == {Kinds.TYPE_SLICE_END}
        events = sorted((e for e in timeline.events if e.worker == worker), key=lambda e: e.start)
        assert [(p.timestamp, q.timestamp) for p, q in zip(begins, ends, strict=True)] == [
            (round(1e9 * e.start), round(1e9 * e.end)) for e in events
        ]


def test_arrows_lead_from_what_sends_to_what_waits(tmp_path: Path) -> None:
    chain = [Action(Kind.FORWARD, 0, 3), Action(Kind.FORWARD, 1, 3)]
    chain += [Action(Kind.BACKWARD, 1, 3), Action(Kind.BACKWARD, 0, 3)]
    workers = (0, 1, 1, 0)
    events = [Event(w, a, k, k + 1) for k, (w, a) in enumerate(zip(workers, chain, strict=True))]
    save_trace({"step": Timeline(2, events)}, tmp_path / "a.pftrace")
    _, packets = read(tmp_path / "a.pftrace")
    flows = {
        p.track_event.name: set(p.track_event.flow_ids)
        for own in packets.values()
        for p in own
        if p.track_event.name
    }
    assert flows["forward 3 in stage 0"] == flows["forward 3 in stage 1"]
    assert flows["backward 3 in stage 1"] == flows["backward 3 in stage 0"]
    assert len(flows["forward 3 in stage 0"]) == 1
    assert flows["forward 3 in stage 0"].isdisjoint(flows["backward 3 in stage 0"])


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(1, [Event(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0)])
    with pytest.raises(ps.InputError, match="cannot write the trace"):
        save_trace({"step": timeline}, tmp_path / "no" / "a.pftrace")
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(ps.PenstockError, match="penstock\\[trace\\]"):
        save_trace({"step": timeline}, tmp_path / "a.pftrace")
