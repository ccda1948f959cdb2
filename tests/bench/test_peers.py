"""The peers of the benchmark: all of them train the same thing, and none outlives its owner."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import fx, nn

from penstock.bench import compare
from penstock.bench.compare import behind
from penstock.bench.peers.data_parallel import data_parallel, sharded
from penstock.bench.peers.one_process import one_process
from penstock.bench.peers.peer import Peer, PeerError, PeerProcesses, Place
from penstock.bench.peers.rpc_pipeline import rpc_pipeline
from penstock.bench.peers.torch_pipelining import torch_pipelining
from penstock.bench.peers.workload import Workload
from penstock.bench.subjects import (
    HALVING,
    LOOPED,
    SCHEDULES,
    SINGLE,
    images,
    quarter_cut,
    resnet50,
    subjects,
    tutorial_cut,
)

WORK = Workload(resnet50, partial(images, 4, 64), nn.functional.mse_loss, 2, learning_rate=0.02)


class Echo:
    """A servant that answers, and whose rank 1 can fail while the others are busy."""

    def __init__(self, place: Place) -> None:
        self._rank = place.rank

    def rank(self) -> int:
        return self._rank

    def fail(self) -> None:
        if self._rank == 1:
            raise ZeroDivisionError("the cause, in its own words")
        time.sleep(60)

    def die(self) -> None:
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def close(self) -> None:
        pass


@pytest.fixture
def processes() -> Iterator[PeerProcesses]:
    processes = PeerProcesses("echo", [Echo, Echo], timeout=60)
    yield processes
    processes.close()
    assert multiprocessing.active_children() == []


def test_every_rank_answers_and_close_leaves_no_process(processes: PeerProcesses) -> None:
    pids = processes.pids
    assert processes.call("rank") == [0, 1]
    processes.close()
    processes.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(RuntimeError, match="echo is closed"):
        processes.call("rank")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fail", r"(?s)rank 1 of 2 raised:.*in fail\n.*ZeroDivisionError: the cause, in its own"),
        ("die", r"echo rank 1 died \(killed by SIGKILL\)"),
    ],
)
def test_a_failure_in_one_process_reaches_the_owner(
    processes: PeerProcesses, command: str, message: str
) -> None:
    pids = processes.pids
    with pytest.raises(PeerError, match=message) as caught:
        processes.call(command)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert "\n" not in caught.value.reason
    assert caught.value.reason in str(caught.value)


def test_of_several_failures_the_reason_is_what_the_one_at_fault_raised() -> None:
    processes = PeerProcesses("meeting", [Meeting, Meeting], timeout=60)
    with pytest.raises(PeerError, match=r"(?s)rank 1 of 2.*rank 0 of 2") as caught:
        processes.call("meet")
    assert caught.value.reason == "ZeroDivisionError: the cause, in two lines"


class Meeting:
    """A rank of gloo that waits for another, which does not come."""

    def __init__(self, place: Place) -> None:
        self._rank = place.rank
        place.join()

    def meet(self) -> None:
        if self._rank == 1:
            raise ZeroDivisionError("the cause,\nin two lines")
        torch.distributed.barrier()

    def close(self) -> None:
        pass


def test_a_pipeline_that_does_not_train_all_parameters_is_no_contestant() -> None:
    """Torch's halves of a backward leave out those of a stage whose inputs need no gradients."""
    last = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 8, 1000))
    stages = [nn.Identity(), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), last]
    peer = torch_pipelining(rows(2, 8, 1), stages, "InterleavedZeroBubble").start()
    with pytest.raises(PeerError, match="2 parameters have no gradient after a step"):
        peer.step()


def rows(count: int, image: int, microbatches: int = 2) -> Workload:
    return Workload(resnet50, partial(images, count, image), nn.functional.mse_loss, microbatches)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 4 is not 3 equal micro-batches"):
        rows(4, 32, microbatches=3)


def test_stages_that_do_not_fit_the_processes_are_refused() -> None:
    stages = [nn.Identity(), nn.Identity(), nn.Identity()]
    with pytest.raises(ValueError, match="1F1B cannot run 3 stages on 2 processes"):
        torch_pipelining(rows(4, 8), stages, "1f1b")


def test_a_stage_that_torch_cannot_run_is_named() -> None:
    stages = [nn.Conv2d(3, 1, 1), nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())]
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        torch_pipelining(rows(4, 8), stages)
    assert caught.value.__notes__ == ["in stage 1, for inputs of the shapes [(2, 1, 8, 8)]"]


def accumulated_losses(steps: int) -> list[float]:
    """The losses of one device that accumulates the gradients of the micro-batches."""
    model = resnet50()
    optimizer = WORK.optimizer(model.parameters())
    inputs, target = WORK.data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, y in zip(inputs.chunk(2), target.chunk(2), strict=True):
            loss = WORK.loss(model(x), y) / 2
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return accumulated_losses(steps=3)
    finally:
        torch.set_num_threads(threads)


def handed_over() -> list[nn.Module]:
    """The tutorial's cut as `fx.GraphModule`s, which is how a planner hands its stages over."""
    return [fx.symbolic_trace(stage) for stage in tutorial_cut()]


def pipelined(schedule: str) -> Peer:
    cut = tutorial_cut if schedule in SINGLE else quarter_cut
    return torch_pipelining(WORK, cut(), schedule).start()


PEERS: dict[str, Callable[[], Peer]] = {
    "one core": lambda: one_process(WORK).start(),
    "data parallel": lambda: data_parallel(WORK).start(),
    "sharded": lambda: sharded(WORK).start(),
    "rpc": lambda: rpc_pipeline(WORK, tutorial_cut()),
    # DualPipeV takes no fewer micro-batches than stages, which are four.
    **{name: partial(pipelined, name) for name in SCHEDULES if name != "DualPipeV"},
}


def check(peer: Peer, expected: list[float]) -> None:
    try:
        for loss in expected:
            assert peer.step() > 0
            assert peer.loss == pytest.approx(loss, rel=1e-4)
    finally:
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", PEERS.values(), ids=PEERS)
def test_every_peer_trains_as_one_device_accumulating_micro_batches(
    start: Callable[[], Peer], expected: list[float]
) -> None:
    check(start(), expected)


@pytest.mark.slow
def test_more_threads_change_the_first_loss_by_rounding_alone(expected: list[float]) -> None:
    check(one_process(WORK, threads=2).start(), expected[:1])


@pytest.mark.slow
def test_stages_that_are_handed_over_are_copied(expected: list[float]) -> None:
    stages = handed_over()
    before = copy.deepcopy([stage.state_dict() for stage in stages])
    check(torch_pipelining(WORK, stages).start(), expected)
    for stage, state in zip(stages, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in stage.state_dict().items())
        assert not any(parameter.is_shared() for parameter in stage.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOOPED)
def test_torch_runs_what_penstock_cuts(schedule: str) -> None:
    """Also where a stage gives what is not contiguous, was saved, or was given to it."""
    subject = subjects(quick=True)["gpt"]
    program = compare.captured(subject)
    # Before and after the first attention, whose inputs are transposed, and within the first MLP.
    before = [call.target for call in program.train.calls].index(
        nn.functional.scaled_dot_product_attention
    )
    stages = program.stages((before, before + 1, before + 8), training=True)
    cut = [compare.Cut(stage.module, 2, schedule in HALVING) for stage in stages]
    peer = torch_pipelining(subject.workload(4), cut, schedule).start()
    whole = one_process(subject.workload(4)).start()
    try:
        for _ in range(2):
            peer.step()
            whole.step()
            assert peer.loss == pytest.approx(whole.loss, rel=1e-5)
    finally:
        peer.close()
        whole.close()


def test_cuts_of_peers_move_behind_what_is_changed_in_place() -> None:
    allowed = [1, 4, 5, 9]
    assert behind((1, 5), allowed) == (1, 5)
    assert behind((2, 3, 5), allowed) == (4, 5, 9)  # each by itself, and none twice
    with pytest.raises(ValueError, match="behind 9"):
        behind((8, 9), allowed)
