"""Kinds of device: which there are, and what each can do."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import penstock as ps
from penstock.devices.choice import existing_devices
from penstock.devices.kinds import accelerator, all_devices, kind_of
from penstock.devices.memory import in_use
from penstock.devices.streams import Copies, on
from penstock.links.local import LocalLink
from penstock.profile.halving import halving_seconds
from tests.support.models import uniform_plan
from tests.support.simulated.machine import Kernel, Machine, Wait
from tests.support.simulated.module import install, simulated

install()
CPU, ONE, TWO = torch.device("cpu"), torch.device("sim:0"), torch.device("sim:1")


def test_cpus() -> None:
    kind = kind_of("cpu")
    assert kind.devices() == all_devices() == [CPU]
    assert accelerator() is None
    assert kind.name(CPU)
    assert kind.memory(CPU) is None
    assert kind.generator(CPU) is torch.default_generator
    kind.synchronize(CPU)
    kind.used_on(None, torch.ones(1))  # type: ignore[arg-type]
    assert not kind.has_streams
    for use in (kind.new_stream, kind.current_stream, kind.using, kind.moment):
        with pytest.raises(TypeError, match="no streams"):
            use(CPU)  # type: ignore[operator]
    state = kind.random_states()
    drawn = torch.rand(2)
    kind.set_random_states(state)
    assert torch.equal(torch.rand(2), drawn)


def test_any_accelerator_of_pytorch_is_one_for_pipelines() -> None:
    with simulated(Machine(2)):
        kind = accelerator()
        assert kind is not None
        assert kind.type == "sim"
        assert kind.devices() == existing_devices(2) == [ONE, TWO]
        assert existing_devices(["sim", "cpu"]) == [ONE, CPU]
        assert all_devices() == [CPU, ONE, TWO]
        assert kind.name(ONE) == "simulated device"
        assert in_use(TWO) == (0, 0)
        held = torch.ones(1000, device=TWO)
        assert in_use(TWO) == (4000, 4000)
        memory = kind.memory(TWO)
        assert memory is not None
        assert memory.total - memory.free == 4000
        del held
        with pytest.raises(ps.DeviceError, match=r"no device 'sim:2' here.*cpu, sim:0, sim:1"):
            existing_devices(["sim:2"])
        with on(TWO):
            assert torch.get_device_module("sim").current_device() == 1
        assert kind.generator(ONE) is torch.default_generator
        kind.set_random_states(kind.random_states())
    assert accelerator() is None
    with pytest.raises(ps.DeviceError, match="this machine has cpu"):
        existing_devices(["sim:0"])


def test_accelerators_without_streams_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's, for instance."""
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch, "mps", types.SimpleNamespace(device_count=lambda: 1))
    assert accelerator() is None
    assert existing_devices(2) == [CPU, CPU]
    with pytest.raises(ps.DeviceError, match="no device 'mps:0' here"):
        existing_devices(["mps"])


class Lazy(Machine):
    """Does nothing before somebody waits for it."""

    def _go_on(self) -> None:
        return


def waits(machine: Machine, device: torch.device) -> list[Wait]:
    """What the stream that computes on a device has still to wait for."""
    queue = machine.defaults[device.index].queue
    assert not any(isinstance(work, Kernel) for work in queue)
    return [work for work in queue if isinstance(work, Wait)]


def test_no_stream_that_computes_waits_for_a_copy_that_it_does_not_need() -> None:
    """The source's never, and the target's only when somebody receives the copy."""
    with simulated(Lazy()) as machine:
        copies = Copies(ONE, TWO)
        value = torch.ones(2, device=ONE)
        machine.run_all()
        first, _ = (copies.start([value]) for _ in range(2))
        assert waits(machine, ONE) == waits(machine, TWO) == []
        copies.wait(*first)
        (wait,) = waits(machine, TWO)
        assert first[1] is not None
        assert wait.ticket is first[1].ticket  # type: ignore[attr-defined]
        assert first[0][0].tolist() == [1, 1]


def test_links_let_their_senders_wait_for_copies_at_the_end_of_a_pass() -> None:
    with simulated(Lazy()) as machine:
        link = LocalLink(ONE, TWO)
        values, gradients = torch.ones(2, device=ONE), torch.ones(2, device=TWO)
        machine.run_all()
        link.send(0, (values,))
        link.send_gradients(0, [gradients])
        assert waits(machine, ONE) == waits(machine, TWO) == []
        link.wait_for_copies(results=True)
        link.wait_for_copies(results=True)  # nothing was sent since
        assert len(waits(machine, ONE)) == 1
        assert waits(machine, TWO) == []
        link.wait_for_copies(results=False)
        assert len(waits(machine, TWO)) == 1


def test_measuring_happens_on_the_device() -> None:
    """A backward in a thread whose current device is another one is an error there."""
    with simulated(Machine(2, is_late=False)), ThreadPoolExecutor(1) as threads:
        assert threads.submit(halving_seconds, TWO).result() >= 0


def test_processes_cannot_share_the_memory_of_every_kind() -> None:
    with (
        simulated(Machine(2)),
        pytest.raises(ps.InputError, match=r"CUDA devices, not on sim:0, whose memory"),
    ):
        ps.Pipeline(
            torch.nn.Linear(2, 2), (torch.ones(2, 2),), devices=[ONE, TWO], workers="processes"
        )


def test_what_no_stage_uses_goes_to_the_first_device() -> None:
    """There the first worker's part of an optimizer expects it, and so does a process."""

    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.mask = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    with simulated(Machine(2)):
        model, x = Unused().to(TWO), torch.ones(2, 2, device=TWO)
        program = ps.capture(model, (x,))
        plan = uniform_plan(program, 2, 1)
        with ps.Pipeline(model, (x,), devices=[ONE, TWO], plan=plan, program=program):
            assert model.mask.device == ONE
            assert model.two.weight.device == TWO
