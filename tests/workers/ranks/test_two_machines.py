"""Ranks on two machines, until the cable between them is cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.support.machines import cut_the_cable, torchrun, two_machines
from tests.workers.ranks import scenarios
from tests.workers.ranks.launching import ROOT, collected
from tests.workers.ranks.steps import X, Y
from tests.workers.ranks.test_torchrun import assert_equal

SCRIPT = ROOT / "tests/workers/ranks/script.py"


@pytest.fixture
def machines() -> Iterator[None]:
    """Two of them."""
    with two_machines():
        yield


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
def test_two_machines_and_a_cut_cable(machines: None, tmp_path: Path, scenario: str) -> None:
    """The bits of threads over both kinds of link; then an error on all ranks."""
    with ExitStack() as files:
        errors = [files.enter_context((tmp_path / f"{k}.err").open("w")) for k in range(2)]
        processes = torchrun((2, 1), [str(SCRIPT), scenario, str(tmp_path)], stderr=errors)
    try:
        wait_for([tmp_path / f"{rank}.ready" for rank in range(3)], 60)
        cut_the_cable()
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
