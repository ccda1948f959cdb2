"""Timelines as Perfetto reads them."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent as Kinds
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.board.phases import events_of
from penstock.observe.trace import save_trace
from penstock.schedule import Action, Event, Kind, Phase, Timeline, build
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


def timeline_with_phases() -> Timeline:
    """Two workers, of which the second waits, computes the loss and sends."""
    first, second = Action(Kind.FORWARD, 0, 3), Action(Kind.FORWARD, 1, 3)
    backward, last = Action(Kind.BACKWARD, 1, 3), Action(Kind.BACKWARD, 0, 3)
    phases = [
        Phase(0, "forward", first, 0.0, 1.0),
        Phase(0, "send", first, 1.0, 1.5),
        Phase(0, "wait", last, 1.5, 7.0),
        Phase(0, "recomputation", last, 7.0, 7.5),
        Phase(0, "backward", last, 7.5, 8.0),
        Phase(0, "turn", last, 8.0, 8.5),
        Phase(0, "backward", last, 8.5, 9.0),
        Phase(1, "wait", second, 0.5, 2.0),
        Phase(1, "forward", second, 2.0, 3.0),
        Phase(1, "loss", second, 3.0, 4.0),
        Phase(1, "wait", backward, 4.0, 5.0),
        Phase(1, "backward", backward, 5.0, 7.0),
        Phase(1, "exchange", None, 7.0, 7.5),
    ]
    by_worker = [[phase for phase in phases if phase.worker == worker] for worker in (0, 1)]
    return Timeline(2, [event for own in by_worker for event in events_of(own)], phases)


def opened(packets: list[Any]) -> list[tuple[int, str, str, float, float]]:
    """The slices of a track: how deep, name, category, start and end in seconds."""
    found, stack = [], []
    for packet in packets:
        event, when = packet.track_event, packet.timestamp / 1e9
        if event.type == Kinds.TYPE_SLICE_BEGIN:
            stack.append((len(stack), event.name, event.categories[0], when))
        else:
            found.append((*stack.pop(), when))
    assert not stack
    return sorted(found, key=lambda each: (each[3], each[0]))


def test_parts_are_slices_within_and_waits_between(tmp_path: Path) -> None:
    save_trace({"step": timeline_with_phases()}, tmp_path / "a.pftrace")
    tracks, packets = read(tmp_path / "a.pftrace")
    first, second = (
        next(uuid for uuid, track in tracks.items() if track.name == f"worker {worker}")
        for worker in (0, 1)
    )
    assert opened(packets[first]) == [
        (0, "forward 3 in stage 0", "forward", 0.0, 1.5),
        (1, "send", "send", 1.0, 1.5),
        (0, "wait for worker 1", "wait", 1.5, 7.0),
        (0, "backward 3 in stage 0", "backward", 7.0, 9.0),
        (1, "recomputation", "recomputation", 7.0, 7.5),
        (1, "wait for other replicas", "turn", 8.0, 8.5),
    ]
    assert opened(packets[second]) == [
        (0, "wait for worker 0", "wait", 0.5, 2.0),
        (0, "forward 3 in stage 1", "forward", 2.0, 4.0),
        (1, "loss", "loss", 3.0, 4.0),
        (0, "wait", "wait", 4.0, 5.0),
        (0, "backward 3 in stage 1", "backward", 5.0, 7.0),
        (0, "exchange", "exchange", 7.0, 7.5),
    ]


def counters(path: Path, name: str) -> list[list[tuple[float, int]]]:
    """The values of the counters of this name: for every worker when, in seconds, and what."""
    tracks, packets = read(path)
    own = [uuid for uuid, track in tracks.items() if track.name == name]
    assert all(tracks[uuid].HasField("counter") for uuid in own)
    assert {p.track_event.type for uuid in own for p in packets[uuid]} <= {Kinds.TYPE_COUNTER}
    return [
        [(p.timestamp / 1e9, p.track_event.counter_value) for p in packets[uuid]] for uuid in own
    ]


def test_counters_of_what_workers_hold(tmp_path: Path) -> None:
    halves = [
        Event(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0),
        Event(0, Action(Kind.FORWARD, 0, 1), 1.0, 2.0),
        Event(0, Action(Kind.INPUT, 0, 0), 2.0, 3.0),
        Event(0, Action(Kind.WEIGHT, 0, 0), 3.0, 4.0),
        Event(0, Action(Kind.BACKWARD, 0, 1), 4.0, 5.0),
    ]
    save_trace({"step": Timeline(1, halves)}, tmp_path / "a.pftrace")
    (held,) = counters(tmp_path / "a.pftrace", "micro-batches held")
    assert held == [(0.0, 1), (1.0, 2), (4.0, 1), (5.0, 0)]
    assert counters(tmp_path / "a.pftrace", "bytes held") == []


def test_a_plan_names_calls_and_says_what_is_held(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 4, "audit": None}
    x = torch.ones(4, 3)
    with ps.Pipeline(model, (x,), devices=["cpu"] * 4, replicas=2, **options) as pipe:
        with pipe.recording() as timelines:
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        plan = pipe.plan
    both = {"measured": timelines[0], "predicted": plan.timeline()}
    save_trace(both, tmp_path / "a.pftrace", plan)
    tracks, packets = read(tmp_path / "a.pftrace")
    workers = [uuid for uuid, track in tracks.items() if track.name.startswith("worker")]
    assert len(workers) == 8
    for worker, uuid in enumerate(workers):
        stage = plan.stages[worker % 2]
        actions = [p.track_event for p in packets[uuid] if "micro-batch" in notes(p)]
        assert actions
        assert {notes(p).get("first call") for p in packets[uuid] if notes(p)} == {stage.first}
        assert {notes(p).get("last call") for p in packets[uuid] if notes(p)} == {stage.last}
    held = counters(tmp_path / "a.pftrace", "bytes held")
    assert len(held) == 8
    for worker, own in enumerate(held):
        each = plan.stages[worker % 2].held_bytes
        assert own[-1][1] == 0
        assert max(value for _, value in own) in (each, 2 * each)
        assert each > 0
    arrows = [flow for own in packets.values() for p in own for flow in p.track_event.flow_ids]
    assert {arrows.count(flow) for flow in arrows} == {2}
    waits = {e.name for uuid in workers[:4] for e in (p.track_event for p in packets[uuid])}
    assert waits & {"wait for worker 0", "wait for worker 1"}


def test_a_recorded_step_saves_itself_with_what_was_predicted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    options: Any = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 4, "replicas": 1}
    x, path = torch.ones(4, 3), tmp_path / "step.pftrace"
    with (
        ps.Pipeline(model, (x,), devices=["cpu"] * 2, audit=None, **options) as pipe,
        pipe.recording() as timelines,
    ):
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        with torch.no_grad():
            pipe(x)
    step, evaluation = timelines
    both = {"measured": step, "predicted": pipe.plan.timeline()}
    save_trace(both, tmp_path / "both.pftrace", pipe.plan)
    path.write_text("an older one")
    step.save(str(path))
    assert path.read_bytes() == (tmp_path / "both.pftrace").read_bytes()
    evaluation.save(path)
    tracks, _ = read(path)
    names = [t.process.process_name for t in tracks.values() if t.HasField("process")]
    assert names == ["measured"]
    with pytest.raises(ps.InputError, match="cannot write the trace to"):
        step.save(tmp_path / "no" / "step.pftrace")


def notes(packet: Any) -> dict[str, Any]:
    """What is said of a slice, by name."""
    notes = packet.track_event.debug_annotations
    return {n.name: n.string_value or n.int_value for n in notes}


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(1, [Event(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0)])
    with pytest.raises(ps.InputError, match="cannot write the trace"):
        save_trace({"step": timeline}, tmp_path / "no" / "a.pftrace")
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(ps.PenstockError, match="penstock\\[trace\\]"):
        save_trace({"step": timeline}, tmp_path / "a.pftrace")
