"""With work of given lengths, a step takes as long as the simulator of schedules says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.devices.kinds import kind_of
from penstock.devices.streams import Ahead, Handover
from penstock.observe.trace import RecordedTimeline
from penstock.schedule import Action, Event, Kind, build
from penstock.simulate import Network, simulate
from tests.interleavings.cases import Case
from tests.interleavings.mutations import Mutation
from tests.interleavings.running import plan_of
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import simulated
from tests.support.simulated.tensors import pinned

FORWARD, BACKWARD = 1.0, 2.0  # seconds of a block
BLOCKS = (2, 3, 1)  # of every stage
MICROBATCHES = 6


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(sum(BLOCKS)) for m in (nn.Linear(3, 3), nn.Tanh())))


def _piped(case: Case, model: nn.Module, x: torch.Tensor) -> ps.Pipeline:
    program = ps.capture(model, (x,))
    return ps.Pipeline(
        model,
        (x,),
        devices=case.devices,
        plan=plan_of(case, program, MICROBATCHES),
        program=program,
        workers="threads",
        audit=None,
        progress=None,
    )


def measured(schedule: str, copy: float, upload: float = 0.0) -> float:
    """The seconds of a step on three devices, from the first kernel to the last."""
    return recorded(schedule, copy, upload, recording=False)[0]


def recorded(
    schedule: str, copy: float, upload: float = 0.0, recording: bool = True
) -> tuple[float, list[RecordedTimeline]]:
    """A step on three devices: its seconds, and what was recorded of it.

    Args:
        schedule: its name.
        copy: seconds of a copy between two devices.
        upload: seconds of a copy of a micro-batch's inputs, or targets, from the CPU; 0 if they
            are on the devices.
        recording: whether it is recorded.
    """
    cuts = (2 * BLOCKS[0], 2 * (BLOCKS[0] + BLOCKS[1]))
    devices = ("sim:0", "sim:1", "sim:2")
    case = Case(_blocks, cuts, shape=(3,), devices=devices, schedule=schedule)
    lengths = {"aten.tanh.default": FORWARD, "aten.tanh_backward.default": BACKWARD, "copy": copy}
    lengths["upload"] = upload
    machine = Machine(3, seed=1, seconds=lengths)
    with simulated(machine):
        model = case.model().to(devices[0])
        x, y = torch.randn(MICROBATCHES, 3, device=devices[0]), torch.randn(MICROBATCHES, 3)
        with _piped(case, model, x) as pipe:
            x, y = (pinned(x.cpu()), pinned(y)) if upload else (x, y.to(devices[-1]))
            pipe.train_step(x, target=y, loss_fn=nn.functional.mse_loss)  # looks at the loss
            machine.run_all()
            for stream in machine.streams:
                stream.clock = 0.0
            with pipe.recording() if recording else nullcontext([]) as timelines:
                pipe.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
            machine.run_all()
            return max(stream.clock for stream in machine.streams), timelines


def predicted(schedule: str, copy: float) -> float:
    return max(event.end for event in events_of(schedule, copy))


def fed(schedule: str, copy: float, upload: float) -> float:
    """What is predicted of a step if inputs have to be uploaded."""
    events = events_of(schedule, copy, (0, *BLOCKS), [upload, copy, copy])
    return max(event.end for event in events if event.worker)


def events_of(
    schedule: str, copy: float, blocks: Sequence[int] = BLOCKS, hops: Sequence[float] = ()
) -> list[Event]:
    def seconds(action: Action) -> float:
        block = FORWARD if action.kind is Kind.FORWARD else BACKWARD
        return blocks[action.stage] * block

    hops = list(hops) or [copy for _ in pairwise(blocks)]
    plan = build(schedule, len(blocks), MICROBATCHES)
    return simulate(plan, seconds, Network(latency=[0.0] * len(hops), transfer=hops)).events


@pytest.mark.parametrize("copy", [0.5, 10.0])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_step_takes_as_long_as_predicted(schedule: str, copy: float) -> None:
    assert measured(schedule, copy) == pytest.approx(predicted(schedule, copy), rel=0.01)


@pytest.mark.parametrize("upload", [0.5, 10.0])
def test_inputs_and_targets_come_ahead(upload: float) -> None:
    """As if there were one more stage, which takes no time, and a link behind it."""
    assert measured("gpipe", 0.5, upload) == pytest.approx(fed("gpipe", 0.5, upload), rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_nothing_waits_for_inputs_but_the_first_forward(schedule: str) -> None:
    expected = predicted(schedule, 0.5) + 0.5
    assert measured(schedule, 0.5, upload=0.5) == pytest.approx(expected, rel=0.01)


def test_inputs_on_the_stream_that_computes_take_longer() -> None:
    lines = [("streams.enter_context(self._to.using(self._writes))", "pass")]
    slow = Mutation("penstock.devices.streams", lines, ["penstock.engine.ends.Ahead"], [])
    with slow.made():
        assert measured("1f1b", 0.5, upload=0.5) > 1.02 * (predicted("1f1b", 0.5) + 0.5)


def test_a_timeline_has_the_times_of_devices() -> None:
    """Each action takes as long as its kernels, and not as long as it takes to give them."""
    _, (timeline,) = recorded("1f1b", 0.5)
    lengths = {event.action: event.end - event.start for event in timeline.events}
    expected = {event.action: event.end - event.start for event in events_of("1f1b", 0.5)}
    assert lengths == pytest.approx(expected, rel=0.01)
    spans = [_spans(timeline.events), _spans(events_of("1f1b", 0.5))]
    assert spans[0] == pytest.approx(spans[1], rel=0.01)


def _spans(events: Sequence[Event]) -> list[float]:
    """For every worker the seconds from its first action to the end of its last one."""
    own = [[event for event in events if event.worker == worker] for worker in range(len(BLOCKS))]
    return [max(e.end for e in each) - min(e.start for e in each) for each in own]


def test_copies_on_the_stream_that_computes_take_longer() -> None:
    """So does a copy to the target's own current stream, which PyTorch lets wait for it."""
    right = measured("1f1b", 2.5)
    for line in ("self._to.using(self._writes)", "self._from.using(self._reads)"):
        lines = [(f"streams.enter_context({line})", "pass")]
        slow = Mutation("penstock.devices.streams", lines, ["penstock.links.local.Copies"], [])
        with slow.made():
            assert measured("1f1b", 2.5) > 1.05 * right


# -- replicas -------------------------------------------------------------------------------------

WEIGHTS = 2 * sum(BLOCKS)  # tensors


def _normed() -> nn.Module:
    return nn.Sequential(*(m for layer in _blocks() for m in (layer, nn.BatchNorm1d(3))))


def of_replicas(
    copy: float, bucket: int = 0, build: Callable[[], nn.Module] = _blocks, rows: int = 1
) -> float:
    """The seconds of a step of two replicas of all blocks; each has half of the micro-batches."""
    devices = ("sim:0", "sim:1")
    case = Case(build, (), shape=(3,), devices=devices, replicas=2)
    lengths = {"aten.tanh.default": FORWARD, "aten.tanh_backward.default": BACKWARD, "copy": copy}
    machine = Machine(2, seed=1, seconds=lengths)
    with simulated(machine), mock.patch("penstock.engine.gathered.BUCKET", bucket):
        model = case.model().to(devices[0])
        x, y = torch.randn(2, rows * MICROBATCHES, 3, device=devices[0])
        with _piped(case, model, x) as pipe:
            for _ in range(2):  # the first one looks at the loss
                pipe.model.zero_grad()
                machine.run_all()
                for stream in machine.streams:
                    stream.clock = 0.0
                pipe.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
                machine.run_all()
            return max(stream.clock for stream in machine.streams)


def predicted_of_replicas(copy: float, last: int) -> float:
    """Weights come first, then the last gradients of the last backward, and the losses at the end.

    Nothing waits for inputs, targets, and all other gradients.
    """
    each = MICROBATCHES // 2
    computing = each * sum(BLOCKS) * (FORWARD + BACKWARD)
    return computing + (WEIGHTS + last + each) * copy


@pytest.mark.parametrize("copy", [0.0, 0.1, 1.0])
def test_gradients_of_replicas_come_while_others_are_computed(copy: float) -> None:
    assert of_replicas(copy) == pytest.approx(predicted_of_replicas(copy, last=2), rel=0.01)


def test_statistics_of_replicas_follow_each_other_without_holding_up_anybody() -> None:
    """A BatchNorm waits for the one of the micro-batch before, and for nothing behind that."""
    computing = predicted_of_replicas(0.0, last=0)
    assert of_replicas(0.0, build=_normed, rows=4) == pytest.approx(computing, rel=0.01)
    assert of_replicas(0.001, build=_normed, rows=4) == pytest.approx(computing, rel=0.01)


def test_gradients_in_one_bucket_come_when_a_backward_has_ended() -> None:
    expected = predicted_of_replicas(0.1, last=WEIGHTS)
    assert of_replicas(0.1, bucket=1 << 20) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("knows", [True, False])
def test_what_the_script_gives_is_not_behind_what_others_compute(knows: bool) -> None:
    """Another thread may have put work on the stream since: it is the default one of all."""
    machine = Machine(2, seconds={"aten.tanh.default": FORWARD, "copy": 0.5})
    here, there = machine.devices
    with simulated(machine):
        x = torch.zeros(3, device=here)
        made = {here: machine.defaults[0].record_event()}
        torch.tanh(x)
        ahead = Ahead(there)
        ahead.begin({0: [x]}, made if knows else {})
        ahead.take(0)
        machine.run_all()
    assert machine.defaults[1].clock == (0.5 if knows else FORWARD + 0.5)


def test_streams_beside_are_in_order_with_those_of_the_caller() -> None:
    machine = Machine(1, seconds={"aten.tanh.default": FORWARD})
    (here,) = machine.devices
    with simulated(machine):
        beside = machine.new_stream(here)
        torch.tanh(torch.zeros(3, device=here))
        handover = Handover([here])
        with handover.taken(beside=[beside]), kind_of(here).using(beside):
            torch.tanh(torch.zeros(3, device=here))
        assert machine.defaults[0].clock < 2 * FORWARD
        handover.back()
        machine.run_all()
    assert beside.clock == machine.defaults[0].clock == 2 * FORWARD
