"""`penstock top` in a real terminal, of tmux."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import penstock as ps

folder = Path(sys.argv[1])

def loss(output, target):
    while (folder / "hang").exists():
        time.sleep(0.05)
    return F.mse_loss(output, target)

if __name__ == "__main__":
    x = torch.ones(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pipe = ps.Pipeline(
        model, (x,), devices=["cpu", "cpu"], workers="processes", cuts=["1"], schedule="1f1b",
        num_microbatches=2, audit=None, on_failure=sys.argv[2],
    )
    print("ready", flush=True)
    try:
        while True:
            pipe.train_step(x, target=x, loss_fn=loss)
            time.sleep(0.05)
    except ps.PenstockError:
        time.sleep(600)
"""
TOP = "from penstock.cli import main; main()"
FOOTER = "q quit"


class Terminal:
    """A terminal of tmux with a shell in a folder.

    Args:
        folder: where the shell is.
        environment: of the shell.
        width: columns.
    """

    def __init__(self, folder: Path, environment: dict[str, str], width: int) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="tm", dir="/tmp"))  # paths of sockets are short
        self._environment = environment
        size = ["-x", str(width), "-y", "45"]
        shell = ["env", "PS1=$ ", "sh"]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), *shell)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-S", str(self._own / "s"), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environment, check=True, timeout=60
        )
        return done.stdout

    def type(self, text: str, *, enter: bool = False) -> None:
        """Press these keys."""
        self._tmux("send-keys", "-l", text)
        if enter:
            self._tmux("send-keys", "Enter")

    def lines(self) -> list[str]:
        """What is on the screen; a line that was too wide for it is one line."""
        return self._tmux("capture-pane", "-p", "-J").splitlines()

    def until(self, holds: Callable[[str], bool]) -> str:
        """What is on the screen once that holds."""
        end = time.monotonic() + 100
        while not holds(text := "\n".join(self.lines())):
            assert time.monotonic() < end, text
            time.sleep(0.1)
        return text

    def is_on_its_other_screen(self) -> bool:
        """Whether a program shows a screen of its own."""
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def close(self) -> None:
        """End it with all that runs in it."""
        self._tmux("kill-server")
        shutil.rmtree(self._own)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run").mkdir()
    places = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(tmp_path / "run")}
    others = {k: v for k, v in os.environ.items() if k not in ("TMUX", "COLUMNS", "LINES", "PS1")}
    return {**others, **places, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def script(
    request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    """One that trains; its parameter is `on_failure`."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(path), str(tmp_path)]
    command.append(getattr(request, "param", "raise"))
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    with running:
        yield running
        running.kill()


@pytest.fixture(params=[80, 200])
def terminal(
    request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path
) -> Iterator[tuple[Terminal, int]]:
    """One with a shell in an empty folder, and its columns."""
    (tmp_path / "here").mkdir()
    shown = Terminal(tmp_path / "here", environment, request.param)
    try:
        shown.until(lambda text: "$" in text)
        yield shown, request.param
    finally:
        shown.close()


def begin(shown: Terminal) -> None:
    """Begin to show pipelines; the shell says how it ended."""
    command = shlex.join([sys.executable, "-c", TOP, "top", "--interval", "0.2"])
    shown.type(f'{command}; echo "ended with $?"', enter=True)
    shown.until(lambda text: FOOTER in text and "steps/s" in text)


def second_worker(tmp_path: Path) -> int:
    """The number of its process."""
    (description,) = (tmp_path / "run" / "penstock").glob("*.json")
    pid: int = json.loads(description.read_text())["workers"][1]["pid"]
    return pid


def end(shown: Terminal) -> None:
    """End it; the shell says that it went well."""
    shown.type("q")
    shown.until(lambda text: "ended with 0" in text)


def fits(shown: Terminal, width: int) -> None:
    assert max(map(len, shown.lines())) <= width


def test_keys(
    script: subprocess.Popen[str], terminal: tuple[Terminal, int], tmp_path: Path
) -> None:
    shown, width = terminal
    here = tmp_path / "here"
    begin(shown)
    assert shown.is_on_its_other_screen()
    fits(shown, width)
    shown.type("t")
    text = shown.until(lambda text: "wrote the timeline of step" in text)
    (path,) = here.glob(f"timeline-{script.pid}-*.pftrace")
    assert path.name in text
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    assert {"loss", "forward 1 in stage 1"} <= {p.track_event.name for p in trace.packet}
    fits(shown, width)
    shown.type("r")
    shown.until(lambda text: "wrote the report" in text or "there can be no report" in text)
    written = [path.name for path in here.glob("*.html")]
    has_report = find_spec("penstock.observe.report") and find_spec("jinja2")
    assert written == ([f"report-{script.pid}.html"] if has_report else [])
    fits(shown, width)
    (tmp_path / "hang").touch()  # from now on a worker hangs in the loss
    shown.until(lambda text: "loss of" in text or "loss 0" in text or "loss 1" in text)
    shown.type("s")
    shown.until(lambda text: "train.py" in text and "in loss" in text)
    fits(shown, width)
    assert FOOTER in shown.lines()[-1]
    end(shown)
    assert not shown.is_on_its_other_screen()
    shown.type("stty -a", enter=True)
    modes = shown.until(lambda text: "icanon" in text and "echoke" in text).split()
    assert "icanon" in modes
    assert "echo" in modes[modes.index("icanon") :]
    shown.type("clear; echo 'it is' seen", enter=True)
    shown.until(lambda text: "it is seen" in text)


@pytest.mark.parametrize("terminal", [80], indirect=True)
def test_a_worker_that_is_stopped_and_killed(
    script: subprocess.Popen[str], terminal: tuple[Terminal, int], tmp_path: Path
) -> None:
    shown, width = terminal
    begin(shown)
    pid = second_worker(tmp_path)
    assert pid != script.pid
    os.kill(pid, signal.SIGSTOP)
    shown.until(lambda text: "stopped by a sig" in text)
    fits(shown, width)
    os.kill(pid, signal.SIGKILL)
    shown.until(lambda text: "its process has e" in text)
    fits(shown, width)
    end(shown)


@pytest.mark.parametrize("script", ["replace"], indirect=True)
@pytest.mark.parametrize("terminal", [200], indirect=True)
def test_a_worker_that_is_replaced(
    script: subprocess.Popen[str], terminal: tuple[Terminal, int], tmp_path: Path
) -> None:
    shown, width = terminal
    begin(shown)
    pid = second_worker(tmp_path)
    assert pid != script.pid
    os.kill(pid, signal.SIGKILL)
    text = shown.until(lambda text: "after step" in text and "worker 1" in text)
    fits(shown, width)
    assert "its process has ended" not in text
    assert second_worker(tmp_path) != pid
    end(shown)
