"""What `Pipeline.status` says while workers work, wait, and are stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.workers import assembly


class Gate(nn.Module):
    """Waits until it may go on, once it is shut."""

    shut = False

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = os.pipe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shut:
            os.read(self.read, 1)
        return x * 1.0

    def open(self, times: int) -> None:
        os.write(self.write, b"x" * times)


def pipeline(workers: str, gate: nn.Module | None = None, **options: object) -> ps.Pipeline:
    middle = gate or nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), middle, nn.Linear(3, 3))
    given = {"cuts": ["2"], "schedule": "1f1b", "num_microbatches": 2, "audit": None, **options}
    return ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu", "cpu"], workers=workers, **given)


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_steps_are_counted(workers: str) -> None:
    x = torch.ones(4, 3)
    with pipeline(workers) as pipe:
        before = pipe.status()
        assert (before.steps, before.step_seconds, before.steps_per_second) == (0, None, None)
        assert [worker.busy for worker in before.workers] == [None, None]
        for _ in range(3):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        F.mse_loss(pipe(x), x).backward()
        pipe.eval_step(x, target=x, loss_fn=F.mse_loss)
        with torch.no_grad():
            pipe(x)
        list(pipe.map([x, x, x]))
        status = pipe.status()
    assert (status.steps, status.rows, status.evaluations, status.tokens) == (4, 16, 5, 0)
    assert [worker.passes for worker in status.workers] == [10, 10]
    assert status.step_seconds is not None
    assert status.steps_per_second is not None
    assert status.samples_per_second == pytest.approx(4 * status.steps_per_second)
    assert status.tokens_per_second is None
    assert status.pass_seconds is None
    assert all(0 < (worker.busy or 0) <= 1 for worker in status.workers)
    assert all(worker.memory > 0 and worker.state == "running" for worker in status.workers)
    assert json.loads(json.dumps(status.to_dict()))["workers"][1]["doing"] == "idle"


def test_tokens_are_integers_in_two_dimensions() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3))
    tokens = torch.zeros(4, 5, dtype=torch.long)
    with ps.Pipeline(model, (tokens,), devices=["cpu"], audit=None) as pipe:
        pipe.train_step(tokens, loss_fn=torch.mean)
        pipe(tokens[:3]).mean().backward()
        assert pipe.status().tokens == 35


def test_what_a_worker_does_and_whom_another_waits_for() -> None:
    gate, x = Gate(), torch.ones(4, 3)
    with pipeline("threads", gate) as pipe:
        gate.shut = True
        step = threading.Thread(
            target=pipe.train_step, args=(x,), kwargs={"target": x, "loss_fn": F.mse_loss}
        )
        step.start()
        eventually(lambda: pipe.status().workers[0].waits)
        status = pipe.status()
        first, last = status.workers
        assert status.pass_seconds is not None
        assert (last.what, last.stage, last.microbatch, last.waits) == ("forward", 1, 0, False)
        assert last.doing == "forward of micro-batch 0 in stage 1"
        assert (first.what, first.stage, first.waits_for) == ("backward", 0, 1)
        assert first.doing == "waits for worker 1: backward of micro-batch 0 in stage 0"
        assert last.seconds > 0
        text = str(status)
        assert "a pass has been under way for" in text
        assert "waits for worker 1" in text
        html = status._repr_html_()
        assert "<td style=text-align:left>waits for worker 1: backward" in html
        assert "<th style=text-align:right>limit" not in html  # as there is none
        assert html.count("shared") == 2  # the second worker's memory is the first one's
        gate.open(2)
        step.join()
        assert [worker.doing for worker in pipe.status().workers] == ["idle", "idle"]


def test_a_stopped_and_a_killed_worker_are_seen() -> None:
    with pipeline("processes") as pipe:
        pid = pipe.status().workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: pipe.status().workers[1].state == "stopped")
        assert pipe.status().workers[1].doing == "stopped by a signal"
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pipe.status().workers[1].state == "gone")
        assert pipe.status().workers[0].state == "running"


def test_a_limit_is_said() -> None:
    with pipeline("threads", memory_limit="1GiB") as pipe:
        assert {worker.limit for worker in pipe.status().workers} == {1 << 30}
        assert "1.1 GB" in str(pipe.status())


def test_waiting_for_a_turn_is_no_work() -> None:
    """The second micro-batch's gradients are added after the first's, which takes its time."""
    x = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    threads: dict[str, str] = {}  # micro-batches are taken by whoever is free

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        threads["second" if target.any() else "first"] = threading.current_thread().name
        if not target.any():
            eventually(lambda: max(w.waited_seconds for w in pipe.status().workers) > 0.3)
        return F.mse_loss(output, target)

    options = {"replicas": 2, "num_microbatches": 2, "audit": None}
    with ps.Pipeline(model, (x,), devices=["cpu", "cpu"], workers="threads", **options) as pipe:
        pipe.train_step(x, target=x, loss_fn=loss)
        workers = {f"penstock-{worker.number}": worker for worker in pipe.status().workers}
    first, second = workers[threads["first"]], workers[threads["second"]]
    assert first.worked_seconds > 0.3  # as long as the second one waits
    assert second.worked_seconds < first.worked_seconds
    assert second.waited_seconds > first.waited_seconds


def test_memory_of_a_device_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "in_use", lambda device: (3, 5))
    x = torch.ones(4, 3)
    with pipeline("threads") as pipe:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        worker = pipe.status().workers[0]
    assert (worker.memory, worker.most_memory) == (3, 5)
