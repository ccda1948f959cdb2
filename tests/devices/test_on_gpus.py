"""What holds on simulated devices, on GPUs: `make test-cuda`. The bodies are the same for both.

One GPU stands for several devices. With two or four, values are copied between them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from tests.devices import on_ranks
from tests.interleavings.cases import CASES
from tests.interleavings.running import computed, differences, one_core, run
from tests.support.machines import torchrun, two_machines
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import simulated
from tests.workers.ranks.launching import environment

_NAMES = [name for name, case in CASES.items() if "cpu" not in case.devices and not case.apart]
_SIMULATED = ["replicas of stages"]  # all of them are elsewhere


@pytest.fixture
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A kind of device, and how many there are."""
    kind, count = request.param
    if kind == "sim":
        with simulated(Machine(count, seed=1)):
            yield kind, count
        return
    if kind == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed, and there are {torch.cuda.device_count()}")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(kind == "cuda")
    yield kind, count
    torch.use_deterministic_algorithms(False)


def _gpus(*counts: int) -> list[Any]:
    return [pytest.param(("cuda", n), marks=pytest.mark.cuda, id=f"{n} GPUs") for n in counts]


def _cases() -> Iterator[Any]:
    yield from (pytest.param(name, ("sim", 4), id=f"{name}, simulated") for name in _SIMULATED)
    for count in (1, 2, 4):
        for name in _NAMES:
            marks, title = pytest.mark.cuda, f"{name}, {count} GPUs"
            yield pytest.param(name, ("cuda", count), marks=marks, id=title)


@pytest.mark.parametrize(("name", "devices"), list(_cases()), indirect=["devices"])
def test_bits_are_those_of_one_device(name: str, devices: tuple[str, int]) -> None:
    """Training, evaluation, map, checkpoints, timelines, replicas, streams of the user's own."""
    case = CASES[name].on(*devices)
    with one_core():
        assert differences(run(case, nullcontext()), computed(case, case.devices[0])) == []


def _cases_of_processes() -> Iterator[Any]:
    for kind, counts in (("cuda", (1, 2)), ("cpu", (1,))):
        for name in _NAMES if kind == "cuda" else _NAMES[:1]:
            for count in counts if CASES[name].replicas == 1 else ():
                marks = pytest.mark.cuda if kind == "cuda" else pytest.mark.slow
                title = f"{name}, {count} GPUs" if kind == "cuda" else f"{name}, CPUs"
                yield pytest.param(name, (kind, count), marks=marks, id=title)


@pytest.mark.parametrize(("name", "devices"), list(_cases_of_processes()), indirect=["devices"])
def test_processes_have_the_bits_of_one_device(name: str, devices: tuple[str, int]) -> None:
    """They have the model's memory on GPUs, where its gradients are put as well."""
    case = CASES[name].on(*devices)
    with one_core():
        found = run(case, nullcontext(), "processes")
        assert differences(found, computed(case, case.devices[0])) == []


@pytest.mark.parametrize(
    "devices",
    [pytest.param(("cpu", 1), marks=pytest.mark.slow), *_gpus(1, 2)],
    indirect=True,
)
def test_ranks_have_the_bits_of_one_device(devices: tuple[str, int]) -> None:
    """Two ranks of torchrun, as stages and as replicas; with one GPU, both on that one."""
    kind, count = devices
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.run(
        [*command, "--nproc-per-node", "2", str(on_ranks.__file__), "near", *_names(kind, count)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("the same bits") == 4
    assert process.stdout.count("shared memory (cuda)") == (2 if kind == "cuda" else 0)


@pytest.mark.parametrize(
    "devices",
    [pytest.param(("cpu", 1), marks=pytest.mark.slow), *_gpus(2)],
    indirect=True,
)
def test_ranks_on_two_machines_have_the_bits_of_one_device(devices: tuple[str, int]) -> None:
    """Between machines values travel by NCCL, if both have a GPU; it refuses one GPU twice."""
    script = [str(on_ranks.__file__), "far", *_names(*devices)]
    said = []
    with two_machines():
        processes = torchrun((1, 1), script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said = [process.communicate(timeout=100)[0] for process in processes]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], "".join(said)
    way = "torch.distributed (nccl)" if devices[0] == "cuda" else "torch.distributed (gloo)"
    for each in said:
        assert each.count("the same bits") == 2
        assert each.count(way) == 1


def _names(kind: str, count: int) -> list[str]:
    """The devices of two ranks."""
    return ["cpu", "cpu"] if kind == "cpu" else [f"cuda:{rank % count}" for rank in range(2)]
