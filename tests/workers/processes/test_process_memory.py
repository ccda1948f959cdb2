"""What worker processes hold: no more than the schedule promises, and the same after 500 steps."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.schedule import check
from penstock.workers.processes.worker_state import WorkerState
from penstock.workers.processes.workers import ProcessWorkers
from tests.support.models import mlp, uniform_plan

PAGE = os.sysconf("SC_PAGE_SIZE")
WORKERS, MICROBATCHES = 3, 10


pytestmark = pytest.mark.usefixtures("pool")


def pipeline(schedule: str, stages: int, workers: int, microbatches: int, rows: int) -> ps.Pipeline:
    model = mlp(*[16] * (stages + 1))
    x = torch.randn(rows, 16)
    program = ps.capture(model, (x,))
    cuts = [str(2 * k) for k in range(1, stages)]
    plan = uniform_plan(program, workers, microbatches, schedule, cuts)
    devices = ["cpu"] * workers
    return ps.Pipeline(model, devices=devices, program=program, plan=plan, workers="processes")


def train(pipe: ps.Pipeline, rows: int) -> None:
    x, y = torch.randn(rows, 16), torch.randn(rows, 16)
    pipe.train_step(x, target=y, loss_fn=F.mse_loss)


def ask(pipe: ps.Pipeline, job: Any) -> list[Any]:
    """What every worker answers to a job of the test's own."""
    workers = pipe._runner.workers
    assert isinstance(workers, ProcessWorkers)
    return workers._pool.run([job] * len(workers._pool), 60.0)


@dataclass(frozen=True)
class Watch:
    """Count what stages hold, after every forward."""

    def __call__(self, own: WorkerState) -> None:
        own.most = {}  # type: ignore[attr-defined]
        for stage in own.assemblies[True].stages.values():
            stage.forward = partial(self.forward, own, stage, stage.forward)  # type: ignore

    @staticmethod
    def forward(own: Any, stage: Any, forward: Any, microbatch: int) -> None:
        forward(microbatch)
        held = {*stage.held, *stage.deferred}
        own.most[stage.index] = max(own.most.get(stage.index, 0), len(held))


@dataclass(frozen=True)
class Seen:
    """What was counted: of each stage the most micro-batches; of each link the slots sent into.

    And how many of these are still in use.
    """

    def __call__(self, own: WorkerState) -> tuple[dict[int, int], dict[int, int], int]:
        slots, lent = {}, 0
        for k, link in own.links.items():
            if hasattr(link, "_out"):  # values to the next stage
                slots[k] = len(link._out._slots._slots)
                lent += sum(slot.lent for slot in link._out._slots._slots)
        return own.most, slots, lent  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("gpipe", WORKERS),
        ("1f1b", WORKERS),
        ("eager-1f1b", WORKERS),
        ("zero-bubble", WORKERS),
        ("interleaved", 2 * WORKERS),
        ("zero-bubble-v", 2 * WORKERS),
    ],
)
def test_stages_hold_what_the_schedule_promises(schedule: str, stages: int) -> None:
    with pipeline(schedule, stages, WORKERS, MICROBATCHES, MICROBATCHES) as pipe:
        ask(pipe, Watch())
        for _ in range(3):
            train(pipe, MICROBATCHES)
        answers = ask(pipe, Seen())
        proven = check(pipe.plan.schedule_for(MICROBATCHES))
        found = {stage: most for most, _, _ in answers for stage, most in most.items()}
        assert found == dict(enumerate(proven.in_flight))
        assert not any(lent for _, _, lent in answers)  # between two steps nothing is held
        for _, slots, _ in answers:
            for stage, count in slots.items():
                # A sender's own stage holds what it has sent, until the gradients come back. But
                # the weight half of the next stage, which keeps the slot, may be put off further.
                most = proven.in_flight[stage]
                if proven.splits_backward:
                    most += proven.in_flight[stage + 1]
                assert 0 < count <= most


@dataclass(frozen=True)
class Size:
    """The resident memory of a worker's process, in bytes, and how many files it has open."""

    def __call__(self, own: WorkerState) -> tuple[int, int]:
        return size()


def size() -> tuple[int, int]:
    """Those of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE
    return resident, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("style", ["train_step", "plain"])
def test_500_steps_grow_no_process(style: str) -> None:
    """A step that left a page behind, in any process, would leave 2 MB."""
    rows = 8
    with pipeline("1f1b", 2, 2, 4, rows) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3, momentum=0.9)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                if style == "plain":
                    pipe(torch.randn(rows, 16)).square().mean().backward()
                else:
                    train(pipe, rows)
                optimizer.step()

        steps(150)
        before = [size(), *ask(pipe, Size())]
        steps(500)
        after = [size(), *ask(pipe, Size())]
    for (resident, files), (resident_then, files_then) in zip(before, after, strict=True):
        assert resident_then - resident < 500 * PAGE // 2
        assert files_then == files
