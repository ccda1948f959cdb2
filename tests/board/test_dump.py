"""The stacks of a process that hangs and holds Python's lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.board.dump import _path, dumped
from penstock.board.process import started_at
from penstock.board.runs import Run, find
from penstock.observe.on_demand import stacks_of
from penstock.observe.watch import Watch


def tiny() -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    given = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    return ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu"] * 2, **given)


pytestmark = [
    pytest.mark.usefixtures("boards"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux"),
]

HANGS = """
import re, torch
import penstock as ps
from torch import nn

def loss(output):
    print("hangs", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")  # for ages, with the lock
    return output.sum()

model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
given = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
with ps.Pipeline(model, (torch.ones(4, 3),), devices=["cpu"] * 2, **given) as pipe:
    pipe.train_step(torch.ones(4, 3), loss_fn=loss)
"""


def test_threads_that_hang_with_the_lock_are_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "hangs\n"
        watch = Watch(child.pid)
        watch.find()
        for _ in range(2):  # what was written before is not shown again
            ((name, stack),) = stacks_of(watch.jobs[0]).items()
            assert name == f"process {child.pid}"
            assert "it cannot run Python now" in stack
            assert stack.count("in loss") == 1
            assert "in match" in stack
    finally:
        child.kill()
        child.communicate()


def test_nobody_is_sent_a_signal_that_would_end_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(OSError, match="does not offer"):
            dumped(tmp_path, child.pid, started_at(child.pid), 0.1)
        _path(tmp_path, child.pid, started_at(child.pid)).touch()  # as if it had offered it
        with pytest.raises(OSError, match="does not offer"):
            dumped(tmp_path, child.pid, started_at(child.pid), 0.1)
        child.communicate(b"\n", timeout=30)
        assert child.returncode == 0
    finally:
        child.kill()


def test_a_process_that_answers_is_never_sent_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`faulthandler` may crash it, while its threads run Python."""

    errors = [ValueError("no"), FileNotFoundError(), ConnectionRefusedError()]

    def never(*_: object) -> str:
        raise AssertionError

    class Busy(Run):
        def ask(self, question: str, timeout: float) -> object:
            raise errors.pop()

    monkeypatch.setattr(Run, "dumped", never)
    with tiny() as pipe:
        (run,) = find()
        while errors:
            busy = Busy(run.description, run.board, run.path)
            assert "no answer" in next(iter(stacks_of([busy]).values()))
        assert "File " in next(iter(stacks_of([run]).values()))
        assert pipe.plan


def test_a_signal_that_the_script_uses_is_left_alone(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from penstock.board.dump import offer_dumps
heard = []
signal.signal(signal.SIGRTMIN + 9, lambda *_: heard.append(1))
offer_dumps(Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGRTMIN + 9)
assert heard == [1]
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert not list(tmp_path.glob("*.dump"))
