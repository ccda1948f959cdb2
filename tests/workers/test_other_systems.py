"""What is done where Linux's own calls are missing: without memfd, pidfd, mallopt and F_SETSIG."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.bench.footprint import keep_memory
from penstock.devices.allocator import keep_freed_memory
from penstock.errors import WorkerDied
from penstock.links.handshake import Listener, call, new_secret
from penstock.links.segment import Segment
from penstock.workers.processes.pool import ProcessPool
from tests.support.models import mlp

X = torch.randn(6, 4)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A system that is not Linux, as far as Python tells."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    return monkeypatch


def test_the_allocator_is_left_alone(elsewhere: pytest.MonkeyPatch) -> None:
    assert keep_freed_memory() is False
    assert "cannot be told" in keep_memory(2)
    with ps.Pipeline(
        mlp(4, 4, 4), (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1
    ) as pipe:
        assert pipe.allocator_kept is False


def test_memory_without_a_name(elsewhere: pytest.MonkeyPatch) -> None:
    """A file that is deleted already; it is shared like the other kind."""
    one = Segment(64)
    one.base.fill_(7)
    assert os.fstat(one.fd).st_nlink == 0
    other = Segment(64, os.dup(one.fd))
    assert torch.equal(other.base, one.base)
    other.base[3] = 9
    assert one.base[3] == 9


def test_a_socket_that_is_a_file_is_removed(elsewhere: pytest.MonkeyPatch) -> None:
    listener, secret = Listener(), new_secret()
    path = Path(listener.address.path)
    assert path.is_socket()
    with ThreadPoolExecutor(1) as beside:  # each proves to the other that it knows the secret
        called = beside.submit(call, listener.address, [], (1, 0), secret, 60)
        here = listener.accept([(1, 0)], secret, 60)[1, 0]
        there = called.result(60)
    there.send(b"three")
    assert here.receive(60).data == b"three"
    here.close()
    there.close()
    listener.close()
    assert not path.exists()


def test_a_dead_worker_is_noticed_without_pidfd(elsewhere: pytest.MonkeyPatch) -> None:
    workers = ProcessPool(2, lambda: None)
    try:
        assert workers.run([lambda own: own.worker] * 2, 60.0) == [0, 1]

        def wait(own: Any) -> None:
            time.sleep(600)

        threading.Timer(0.2, os.kill, [workers.pids[1], signal.SIGKILL]).start()
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            workers.run([lambda own: 1, wait], 600.0)
    finally:
        workers.close()


def test_a_step_of_processes(elsewhere: pytest.MonkeyPatch) -> None:
    model = mlp(4, 4, 4)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 2}
    with ps.Pipeline(model, (X,), workers="processes", **options, replicas=1) as pipe:
        loss = pipe.train_step(X, target=X, loss_fn=F.mse_loss)
    torch.set_num_threads(1)
    parts = zip(X.tensor_split(2), X.tensor_split(2), strict=True)
    expected = sum(F.mse_loss(model(a), b).detach() * (len(a) / len(X)) for a, b in parts)
    assert torch.equal(loss, expected)


WATCHED = """
import fcntl, sys, time
if sys.argv[2] == "without":
    del fcntl.F_SETSIG
from penstock.workers.processes.child import _follow
_follow(int(sys.argv[1]))
print("follows", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["with", "without"])
def test_a_worker_ends_with_its_driver(kind: str) -> None:
    """By a signal of the kernel's, or by a thread that reads."""
    read, write = os.pipe()
    command = [sys.executable, "-c", WATCHED, str(read), kind]
    with subprocess.Popen(
        command, pass_fds=[read], stdout=subprocess.PIPE, process_group=0
    ) as child:
        os.close(read)
        assert child.stdout is not None
        assert child.stdout.readline() == b"follows\n"
        end = os.pidfd_open(child.pid)
        assert not select.select([end], [], [], 0.1)[0]
        os.close(write)
        assert select.select([end], [], [], 60)[0]
        os.close(end)
        assert child.wait() == (-signal.SIGKILL if kind == "with" else 1)
