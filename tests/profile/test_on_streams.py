"""Profiles of devices whose work is queued on streams; the devices are simulated."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.devices.accelerator import Accelerator
from penstock.plan.text import launches
from penstock.profile import team
from penstock.profile.timing import Stopwatch, launching
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()

SECONDS = {
    "aten.tanh.default": 1.0,
    "aten.tanh_backward.default": 2.0,
    "aten.sigmoid.default": 3.0,
    "aten.sigmoid_backward.default": 5.0,
}


def _profile(**options: Any) -> ps.Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()).to("sim:0")
    program = ps.capture(model, (torch.randn(8, 3, device="sim:0"),))
    return ps.profile(program, devices=["sim:0", "sim:1"], seconds=1.0, **options)


@pytest.mark.parametrize("is_late", [False, True])
def test_calls_take_what_their_kernels_take(is_late: bool) -> None:
    with simulated(Machine(2, is_late=is_late, seconds=SECONDS)):
        found = _profile()
    for kind in found.kinds.values():
        assert set(kind.forward) == {(0.0, 1.0, 0.0, 3.0)}
        assert set(kind.backward) == {(0.0, 2.0, 0.0, 5.0)}
        assert kind.spread == 0


def test_forwards_alone_take_what_their_kernels_take() -> None:
    with simulated(Machine(2, seconds=SECONDS)):
        found = _profile(inference=True)
    assert set(found.on("sim:1").forward) == {(0.0, 1.0, 0.0, 3.0)}


def test_a_stopwatch_waits_for_nothing_before_it_is_read() -> None:
    with simulated(Machine(1, seconds=SECONDS)) as machine:
        x = torch.ones(2, device="sim:0")
        watch = Stopwatch(x.device)
        machine._eagerness = 0.0
        with watch:
            torch.tanh(torch.tanh(x))
        with watch:
            torch.sigmoid(x)
        assert "aten.tanh.default" not in [name for _, name in machine.order]
        assert watch.seconds() == [2.0, 3.0]


def test_how_long_the_cpu_launches_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("sim:0")
    with simulated(Machine(1, is_late=False)):
        x = torch.ones(2, device=device)
        done = Accelerator.synchronize

        def slow(self: Accelerator, device: torch.device) -> None:
            time.sleep(0.3)
            done(self, device)

        monkeypatch.setattr(Accelerator, "synchronize", slow)
        begun = time.perf_counter()
        seconds = launching(lambda: torch.tanh(x), device)
        assert 0 < seconds < (time.perf_counter() - begun) / 2  # without the wait for the device


def test_what_is_launched_is_compared_with_what_it_takes() -> None:
    with simulated(Machine(2, seconds=SECONDS)):
        kind = _profile().on("sim:0")
    assert 0 < kind.launching < 1
    assert kind.launched(2) == kind.launching / 11
    assert msgspec.structs.replace(kind, launching=5.5).launched(2) == 0.5
    assert msgspec.structs.replace(kind, launching=50.0).launched(2) == 1


def test_a_plan_says_that_devices_wait_for_the_cpu() -> None:
    with simulated(Machine(2, seconds=SECONDS)):
        measured = _profile()

        def said(share: float, name: str = "sim") -> list[str]:
            replaced = {
                kind: msgspec.structs.replace(known, launching=11 * share)
                for kind, known in measured.kinds.items()
            }
            kinds = {kind.replace("sim", name): known for kind, known in replaced.items()}
            devices = tuple(kinds)
            profile = msgspec.structs.replace(measured, kinds=kinds, devices=devices)
            return launches(ps.plan(profile, replicas=1), profile)

        assert said(0.5) == []
        assert said(0.95) == [
            f"sim:{k} waits for the CPU, which launches its work for 95% of the time of a "
            "micro-batch: larger micro-batches are launched less often."
            for k in (0, 1)
        ]
        (first, _) = said(0.95, "cuda")
        assert "cuda_graphs=True launches a stage at once" in first
        assert 'with workers="processes" every GPU' in first


def test_a_pipeline_warns_of_devices_that_wait_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(team, "launching", lambda work, device: 100.0)
    with simulated(Machine(2, seconds=SECONDS)), caplog.at_level(logging.WARNING):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()).to("sim:0")
        x = torch.randn(8, 3, device="sim:0")
        with ps.Pipeline(
            model, (x,), devices=["sim:0", "sim:1"], replicas=1, progress=None, audit=None
        ):
            pass
    assert "sim:0 waits for the CPU, which launches its work for 100% of the time" in caplog.text


def test_nothing_is_launched_on_cpus() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(8, 3)
    found = ps.profile(ps.capture(model, (x,)), devices=["cpu"], seconds=0.2)
    assert found.on("cpu").launching == 0
    assert found.on("cpu").launched(4) == 0
