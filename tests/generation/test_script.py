"""Scripts: each has random numbers, and streams of devices, as if it were alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.generation import script as module
from penstock.generation.script import Ended, Script
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()


def test_what_scripts_draw_on_devices_does_not_depend_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = torch.Generator().manual_seed(9)  # that of a device
    kind = SimpleNamespace(generator=lambda device: ours)
    monkeypatch.setattr(module, "kind_of", lambda device: kind)
    monkeypatch.setattr(module, "Currents", lambda devices: SimpleNamespace(taken=_nothing))

    def drawing(script: Script) -> Any:
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(2, generator=ours))
            script.ask(None)
        return torch.stack(drawn)

    device = torch.device("cuda:0")
    one, other = (Script(drawing, seed, 1, [device]) for seed in (1, 2))
    ends: dict[int, torch.Tensor] = {}
    before = ours.get_state()
    for _ in range(4):
        for number, each in ((1, one), (2, other)):
            event = each.resume()
            assert torch.equal(ours.get_state(), before)
            torch.rand(1, generator=ours)  # somebody else draws meanwhile
            before = ours.get_state()
            if isinstance(event, Ended):
                ends[number] = event.result
    for seed, found in ends.items():
        alone = torch.Generator().manual_seed(seed)
        assert torch.equal(found, torch.stack([torch.rand(2, generator=alone) for _ in range(3)]))
    assert sorted(ends) == [1, 2]


def _nothing() -> Any:
    return torch.enable_grad()  # any context manager will do


def test_scripts_work_on_the_current_streams_of_whoever_has_made_them() -> None:
    with simulated(Machine(2)):
        sim: Any = torch.get_device_module("sim")
        devices = [torch.device("sim:0"), torch.device("sim:1")]

        def looking(script: Script) -> Any:
            return sim.current_device(), [sim.current_stream(device) for device in devices]

        streams = [sim.Stream(device) for device in devices]
        with sim.stream(streams[0]), sim.stream(streams[1]), sim.device(devices[0]):
            script = Script(looking, 0, 1, devices)
        event = script.resume()
        assert isinstance(event, Ended)
        assert event.result == (0, streams)
