"""`penstock top`, by itself and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from torch import nn

import penstock as ps
from penstock.cli import main

TOP = [sys.executable, "-c", "from penstock.cli import main; main()", "top"]

SCRIPT = """
import time
import torch
from torch import nn
from torch.nn import functional as F
import penstock as ps

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.ones(4, 3)
    pipe = ps.Pipeline(
        model, (x,), devices=["cpu", "cpu"], workers="processes", cuts=["1"], schedule="1f1b",
        num_microbatches=2, audit=None,
    )
    print("ready", flush=True)
    while True:
        pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("run")
    places = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    return {**os.environ, **places, "TERM": "xterm-256color"}


@pytest.fixture(scope="module")
def script(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    with running:
        yield running
        running.kill()


def top(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TOP, *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_nothing_runs(tmp_path: Path) -> None:
    found = top({**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}, "--once")
    assert found.returncode == 2
    assert "none is running" in found.stderr


def test_once(script: subprocess.Popen[str], environment: dict[str, str]) -> None:
    found = top(environment, "--once")
    assert found.returncode == 0, found.stderr
    assert f"Sequential (process {script.pid})" in found.stdout
    assert re.search(r"^0 cpu .*%", found.stdout, re.MULTILINE)
    assert re.search(r"^1 cpu ", found.stdout, re.MULTILINE)


def test_a_figure(
    script: subprocess.Popen[str], environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "top.svg"
    found = top(environment, str(script.pid), "--figure", str(path))
    assert found.returncode == 0, found.stderr
    assert "Sequential" in path.read_text()
    wrong = top(environment, "--figure", str(tmp_path / "no" / "top.svg"))
    assert wrong.returncode == 2
    assert "cannot write the figure" in wrong.stderr


def test_json_with_stacks(script: subprocess.Popen[str], environment: dict[str, str]) -> None:
    found = top(environment, str(script.pid), "--once", "--json", "--stacks")
    data = json.loads(found.stdout)
    (status,) = data["pipelines"]
    assert status["steps"] > 0
    assert [worker["state"] for worker in status["workers"]] == ["running", "running"]
    assert len(data["stacks"]) == 2


def test_another_process_drives_none(
    script: subprocess.Popen[str], environment: dict[str, str]
) -> None:
    assert script.poll() is None
    found = top(environment, "1", "--once")
    assert found.returncode == 2
    assert "process 1 drives none" in found.stderr


def test_a_timeline_without_a_terminal(
    script: subprocess.Popen[str], environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "step.pftrace"
    found = top(environment, str(script.pid), "--record", str(path), "--json")
    assert found.returncode == 0, found.stderr
    data = json.loads(found.stdout)
    assert (data["pid"], data["timeline"]) == (script.pid, str(path))
    assert data["step"] > 0
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    assert {"send", "backward 1 in stage 0"} <= {p.track_event.name for p in trace.packet}
    wrong = top(environment, "--record", str(tmp_path / "no" / "step.pftrace"))
    assert wrong.returncode == 2
    assert "cannot write the trace" in wrong.stderr


@pytest.mark.usefixtures("boards")
def test_one_of_several_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, path = torch.ones(4, 3), tmp_path / "step.pftrace"
    with ps.Pipeline(nn.Linear(3, 3), (x,), devices=["cpu"], audit=None):
        monkeypatch.setitem(sys.modules, "penstock.observe.report", None)
        alone = CliRunner().invoke(main, ["top", "--report", str(tmp_path / "a.html")])
        assert alone.exit_code == 1
        assert "there can be no report without penstock.observe.report" in alone.stderr
        with ps.Pipeline(nn.Linear(3, 3), (x,), devices=["cpu"], audit=None):
            found = CliRunner().invoke(main, ["top", "--record", str(path)])
    assert found.exit_code == 2
    assert f"2 pipelines are running, in the processes {os.getpid()}, {os.getpid()}" in found.stderr
    assert not path.exists()


def read_until(terminal: int, holds: Callable[[str], bool]) -> str:
    """What a program writes to its terminal, until that holds."""
    text, end = "", time.monotonic() + 60
    while not holds(text):
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def test_live_in_a_terminal(script: subprocess.Popen[str], environment: dict[str, str]) -> None:
    own, terminal = pty.openpty()
    command = [*TOP, "--interval", "0.2"]
    sizes = {"COLUMNS": "100", "LINES": "40"}
    shown = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**environment, **sizes}
    )
    os.close(terminal)
    try:
        read_until(own, lambda text: "steps/s" in text and "latest looks" in text)
        os.write(own, b"s")
        read_until(own, lambda text: f"process {script.pid}, worker 1" in text)
        os.write(own, b"q")
        read_until(own, lambda text: shown.poll() is not None or "\x1b[?1049l" in text)
        assert shown.wait(20) == 0
    finally:
        shown.kill()
        os.close(own)
