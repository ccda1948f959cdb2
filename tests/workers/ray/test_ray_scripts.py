"""Scripts of their own in a Ray cluster: its nodes, its end, Ray Train, two machines."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.machines import two_machines
from tests.workers.ranks.launching import ROOT

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "tests/workers/ray/jobs_of_scripts.py"
SECONDS = 900.0
NAMES = [f"psr{os.getpid()}{side}" for side in "ab"]
IPS = ["10.213.8.1", "10.213.8.2"]
PORT = 6397


def environment(**more: str) -> dict[str, str]:
    others = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    own = {"RAY_TMPDIR": f"/tmp/psr{os.getpid()}"}  # no other cluster of this machine is joined
    return {**others, **own, "PYTHONPATH": str(ROOT), "RAY_BACKEND_LOG_LEVEL": "fatal", **more}


def run(*words: str, within: Sequence[str] = (), **more: str) -> None:
    """Run a script, which says when it is done."""
    command = [*within, sys.executable, "-W", "ignore", str(SCRIPT), *words]
    found = subprocess.run(
        command,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        start_new_session=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.rstrip().endswith("done")


@pytest.fixture(autouse=True)
def _ray() -> None:
    pytest.importorskip("ray")


@pytest.mark.timeout(SECONDS)
def test_nodes_come_and_go_while_a_script_trains() -> None:
    run("nodes")


@pytest.mark.timeout(SECONDS)
def test_nodes_are_lost_while_a_script_trains() -> None:
    run("lost_nodes")


@pytest.mark.timeout(SECONDS)
def test_ray_is_started_and_shut_down_by_itself() -> None:
    run("alone")


@pytest.mark.timeout(SECONDS)
def test_ranks_of_ray_train(tmp_path: Path) -> None:
    why = "needs pip install 'ray[train]'"
    pytest.importorskip("ray.train", reason=why, exc_type=ImportError)
    run("in_ray_train", str(tmp_path))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_actor_outlives_its_script(how: signal.Signals) -> None:
    """Ctrl-C reaches all processes of the terminal; SIGKILL only the script."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "forever"]
    script = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    lines = (line.split() for line in script.stdout)
    pids = next([int(word) for word in words] for words in lines if all(map(str.isdigit, words)))
    assert len(pids) == 3
    assert all(map(is_running, pids))
    time.sleep(1.0)
    (os.killpg if how is signal.SIGINT else os.kill)(script.pid, how)
    script.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[list[str]]]:
    """For either of two machines how a command is run there; each has a node of one cluster."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare command to make machines with")
    with two_machines(NAMES, IPS), contextlib.ExitStack() as stack:
        stack.callback(end_all)
        start(tmp_path)
        yield [["ip", "netns", "exec", name] for name in NAMES]


def start(folder: Path) -> None:
    """Start a node of Ray on each machine; the second one has a folder of its own for its files."""
    ray = Path(sys.executable).with_name("ray")
    there = Path("/tmp") / f"penstock-ray-{os.getpid()}"  # sockets have short names
    common = [str(ray), "start", "--num-cpus=1", "--disable-usage-stats"]
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={there}"]
    commands = [
        [*common, *head, f"--node-ip-address={IPS[0]}"],
        [*common, f"--address={IPS[0]}:{PORT}", f"--node-ip-address={IPS[1]}"],
    ]
    mount = f'mkdir -p {there} && mount -t tmpfs none {there} && exec "$@"'
    within = [[], ["unshare", "-m", "sh", "-c", mount, "sh"]]
    for name, own, command in zip(NAMES, within, commands, strict=True):
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(
                ["ip", "netns", "exec", name, *own, *command],
                env=environment(RAY_raylet_start_wait_time_s="60"),
                stdout=log,
                stderr=log,
                check=True,
                timeout=120,
            )


def end_all() -> None:
    """Kill whatever runs on these machines."""
    for name in NAMES:
        found = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(f"/tmp/penstock-ray-{os.getpid()}", ignore_errors=True)


@pytest.mark.timeout(SECONDS)
def test_two_machines(machines: list[list[str]]) -> None:
    """Values and gradients go over torch.distributed; the bits are those of threads."""
    run("machines", within=machines[0], RAY_ADDRESS=f"{IPS[0]}:{PORT}")
