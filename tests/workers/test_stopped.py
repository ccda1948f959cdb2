"""A worker that a signal has stopped is noticed in seconds, by its pulse and not by a timeout."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.board import process
from penstock.board.process import started_at
from penstock.errors import WorkerTimeout
from penstock.links.wire import Wire
from penstock.workers import heartbeat as pulse
from penstock.workers.heartbeat import Beats, Pulse
from penstock.workers.processes.pool import ProcessPool
from tests.support.models import mlp, uniform_plan
from tests.support.pool import lend

X = torch.randn(6, 8)
FOREVER = 3600.0  # the tests end long before
_ATTACH, _DETACH = 16, 17  # what ptrace is asked for


@pytest.fixture
def team() -> Iterator[ProcessPool]:
    found = ProcessPool(2, lambda: None)
    found.run([lambda own: None] * 2)
    yield found
    found.close()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "100"]) as found:
        yield found.pid
        found.kill()


def test_a_stopped_worker_ends_a_step_at_default_settings() -> None:
    model = mlp(8, 8, 8)
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 2)
    pipe = ps.Pipeline(model, (X,), program=program, plan=plan, devices=["cpu"] * 2,
                       workers="processes")  # fmt: skip
    workers: Any = pipe._runner.workers
    assert workers._timeout >= 60
    with pipe:
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        os.kill(workers._pool.pids[1], signal.SIGSTOP)
        stopped = r"worker 1 is stopped by a signal \(such as SIGSTOP"
        with pytest.raises(ps.WorkerTimeout, match=stopped):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
        with pytest.raises(ps.ClosedError):
            pipe(X)


def test_a_stopped_worker_does_not_read_what_is_sent(team: ProcessPool) -> None:
    data = os.urandom(3_000_000)
    os.kill(team.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match="stopped by a signal"):
        team.run([lambda own: len(data)] * 2, FOREVER)


def test_a_worker_that_goes_on_soon_or_is_busy_is_waited_for() -> None:
    team = lend(2, lambda: None)
    team.run([lambda own: None] * 2)  # it has started
    os.kill(team.pids[0], signal.SIGSTOP)
    threading.Timer(1.5, os.kill, [team.pids[0], signal.SIGCONT]).start()
    assert team.run([lambda own: time.sleep(own.worker * 4.0) or own.worker] * 2, 60) == [0, 1]
    team.close()


class Clock:
    """Time as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pulse.time, "monotonic", lambda: self.now)


def seen(watched: Pulse, clock: Clock, *moments: float) -> list[bool]:
    found = []
    for moment in moments:
        clock.now = moment
        found.append(watched.has_stopped())
    return found


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not Pulse(pid).is_stopped():
        pass


def test_the_pulse_of_a_process(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, clock = Pulse(sleeper), Clock(monkeypatch)
    assert seen(watched, clock, 0, 1, 2, 3) == [False] * 4
    stop(sleeper)
    assert seen(watched, clock, 4, 5, 6, 7) == [False, False, True, True]
    assert seen(watched, clock, 20, 21) == [False, False]  # this process was stopped itself
    assert seen(watched, clock, 22) == [True]
    os.kill(sleeper, signal.SIGCONT)
    while watched.is_stopped():
        pass
    assert seen(watched, clock, 23) == [False]


def test_a_process_that_a_debugger_has_stopped_does_not_count(sleeper: int) -> None:
    ptrace = ctypes.CDLL(None).ptrace
    if ptrace(_ATTACH, sleeper, None, None):
        pytest.skip("this process may not trace another one")
    os.waitpid(sleeper, os.WUNTRACED)
    assert process.fields(sleeper)[process.STATE] == "t"
    assert not Pulse(sleeper).is_stopped()
    ptrace(_DETACH, sleeper, None, None)


def test_another_process_of_the_same_number(sleeper: int) -> None:
    stop(sleeper)
    assert Pulse(sleeper).is_stopped()
    assert not Pulse(sleeper, started=1).is_stopped()
    assert not Pulse(2**22 + 1).is_stopped()
    assert started_at() > 0


def test_beats_are_heard_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_EVERY", 0.02)
    monkeypatch.setattr(pulse, "_SILENT", 0.5)
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    here = Beats({1: Wire(a), 2: Wire(c)})
    there = Beats({0: Wire(b)})  # and nobody beats at d
    deadline = time.monotonic() + 20
    while not here.of(2).has_stopped() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert here.of(2).has_stopped()
    assert not here.of(1).has_stopped()
    there.close()  # who leaves in good order is not taken for stopped
    d.close()
    time.sleep(1)
    assert not here.of(1).has_stopped()
    here.close()
