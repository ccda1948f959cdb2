"""Two machines: two network namespaces that a virtual cable joins."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.workers.ranks import scenarios
from tests.workers.ranks.launching import ROOT, collected, environment, free_port
from tests.workers.ranks.steps import X, Y
from tests.workers.ranks.test_torchrun import assert_equal

NAMES = [f"pst{os.getpid()}{side}" for side in "ab"]
IPS = ["10.213.7.1", "10.213.7.2"]


def ip(*words: str) -> None:
    """Run `ip`, which needs to be root."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """For either machine how a command is run there."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    with contextlib.ExitStack() as stack:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
            for name, address in zip(NAMES, IPS, strict=True):
                ip("link", "set", name, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in NAMES]


def launch(
    machine: list[str], number: int, ranks: int, scenario: str, directory: Path, port: int
) -> subprocess.Popen[str]:
    """torchrun on one of the machines."""
    command = [*machine, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--node-rank", str(number), "--nproc-per-node", str(ranks)]
    command += ["--master-addr", IPS[0], "--master-port", str(port), "--monitor-interval", "30"]
    command += [str(ROOT / "tests/workers/ranks/script.py"), scenario, str(directory)]
    env = {**environment(), "GLOO_SOCKET_IFNAME": NAMES[number]}
    with (directory / f"{number}.err").open("w") as stderr:
        return subprocess.Popen(command, env=env, stderr=stderr, start_new_session=True, text=True)


def wait_for(paths: list[Path], seconds: float) -> None:
    """Until these files are there."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            pytest.fail("\n".join(p.read_text()[-3000:] for p in paths[0].parent.glob("*.err")))
        time.sleep(0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scenario", ["two_machines", pytest.param("patient_machines", marks=pytest.mark.slow)]
)
def test_two_machines_and_a_cut_cable(
    machines: list[list[str]], tmp_path: Path, scenario: str
) -> None:
    """The bits of threads over both kinds of link; then an error on all ranks."""
    port = free_port()  # here, and so in the new namespaces, where nobody listens yet
    processes = [launch(m, k, 2 - k, scenario, tmp_path, port) for k, m in enumerate(machines)]
    try:
        wait_for([tmp_path / f"{rank}.ready" for rank in range(3)], 60)
        ip("-n", NAMES[0], "link", "set", NAMES[0], "down")
        wait_for([tmp_path / f"{rank}.pt" for rank in range(3)], 180)
        ranks = collected(tmp_path, 3)
        wait_until_gone([found[-1] for found in ranks], 60)
        assert "terminate called" not in "".join(p.read_text() for p in tmp_path.glob("*.err"))
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    with scenarios.trapped(3, workers="threads", devices=["cpu"] * 3) as pipe:
        torch.set_num_threads(1)
        losses = [pipe.train_step(X[:n], target=Y[:n], loss_fn=F.mse_loss) for n in (11, 11, 9, 6)]
        with torch.no_grad():
            losses.append(pipe(X))
    gradients: dict[str, torch.Tensor] = {}
    for found, signals, links, error, _ in ranks:
        assert_equal("losses", found[0], losses)
        gradients |= found[1]
        assert links == ("shared memory", "torch.distributed (gloo)")
        # In the steady state nothing but the values travels, of which the other side knows the
        # size before: that which was said with the message before.
        assert [payload for payload, _, _ in signals] == [False] * len(signals)
        assert [after for _, after, _ in signals[:-1]] == [size for _, _, size in signals[1:]]
        assert error[0] in ("WorkerTimeout", "WorkerDied"), error
    assert [len(signals) for _, signals, *_ in ranks] == [0, 3, 3]
    for name, parameter in pipe.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


def wait_until_gone(pids: list[int], seconds: float) -> None:
    """Until these processes have ended."""
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
