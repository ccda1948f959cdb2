"""The simulated accelerator itself: late, in any order, and strict about memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.simulated.machine import DeviceFault, Machine
from tests.support.simulated.module import install, simulated

SIM = "sim:0"


class Lazy(Machine):
    """Does nothing before somebody waits for it."""

    def _go_on(self) -> None:
        return


@pytest.fixture
def machine() -> Iterator[Machine]:
    install()
    with simulated(Lazy()) as running:
        yield running


def module() -> Any:
    install()
    return torch.get_device_module("sim")


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """What is in a device's memory now, though the work may not be done."""
    storage: Any = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.handle.block.memory)


def test_work_is_late_and_whoever_reads_waits(machine: Machine) -> None:
    one = torch.ones(3, device=SIM)
    two = one + 1
    assert contents(two).isnan().all()
    assert two.sum().item() == 6
    assert contents(two).tolist() == [2, 2, 2]
    assert two.tolist() == [2, 2, 2]
    assert torch.equal(two, torch.full((3,), 2.0, device=SIM))


def test_there_are_devices_only_while_a_machine_runs() -> None:
    install()
    assert not torch.accelerator.is_available()
    with simulated(Machine(3)):
        assert torch.accelerator.current_accelerator() == torch.device("sim")
        assert torch.accelerator.device_count() == 3
    assert module().device_count() == 0


def test_kernels_cannot_read_the_memory_of_others(machine: Machine) -> None:
    here, there = torch.ones(3, device=SIM), torch.ones(3, device="sim:1")
    with pytest.raises(DeviceFault, match=r"sim:0.*sim:1"):
        here + there
    with pytest.raises(DeviceFault, match="cannot read a tensor of the CPU"):
        here + torch.ones(3)
    with pytest.raises(RuntimeError, match="numpy"):
        here.numpy()
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert (here + there.to(SIM)).tolist() == [2, 2, 2]


def test_streams_know_of_each_other_by_events_only(machine: Machine) -> None:
    sim = module()
    value = torch.zeros(2, device=SIM)
    sim.synchronize(SIM)
    stream = sim.Stream(SIM)
    value += 1
    with sim.stream(stream):
        early = value + 0
    stream.synchronize()
    assert contents(early).tolist() == [0, 0]
    stream.wait_stream(sim.current_stream(SIM))
    with sim.stream(stream):
        later = value + 0
    stream.synchronize()
    assert contents(later).tolist() == [1, 1]


def test_an_event_is_a_point_and_not_a_stream(machine: Machine) -> None:
    sim = module()
    value = torch.zeros(2, device=SIM)
    event = sim.current_stream(SIM).record_event()
    value += 1
    event.synchronize()
    assert event.query()
    assert contents(value).tolist() == [0, 0]


def test_streams_that_wait_for_each_other_are_an_error(machine: Machine) -> None:
    sim = module()
    one, other = sim.Stream(SIM), sim.Stream(SIM)
    tickets = [machine._recorded(stream) for stream in (one, other)]
    for stream in (one, other):
        stream.queue.clear()
    machine.wait(one, tickets[1])
    machine.wait(other, tickets[0])
    with pytest.raises(DeviceFault, match="wait for one another"):
        one.synchronize()


def test_memory_is_reused_at_once_by_its_stream_and_read_as_poison_by_others(
    machine: Machine,
) -> None:
    sim, stream = module(), module().Stream(SIM)
    stream.weight = 1e-9  # it comes last
    value = torch.ones(2, device=SIM)
    memory = contents(value)
    with sim.stream(stream):
        stream.wait_stream(machine.defaults[0])
        late = value * 3
    del value
    again = torch.empty(2, device=SIM)
    assert contents(again).data_ptr() == memory.data_ptr()
    machine.defaults[0].synchronize()
    stream.synchronize()
    assert late.isnan().all()


def test_record_stream_keeps_memory(machine: Machine) -> None:
    sim, stream = module(), module().Stream(SIM)
    stream.weight = 1e-9  # it comes last
    value = torch.ones(2, device=SIM)
    memory = contents(value)
    with sim.stream(stream):
        stream.wait_stream(machine.defaults[0])
        late = value * 3
    value.record_stream(stream)
    del value
    assert contents(torch.empty(2, device=SIM)).data_ptr() != memory.data_ptr()
    machine.defaults[0].synchronize()
    stream.synchronize()
    assert late.tolist() == [3, 3]
    assert contents(torch.empty(2, device=SIM)).data_ptr() == memory.data_ptr()


def test_copies_to_the_cpu_are_late_unless_they_block(machine: Machine) -> None:
    value = torch.ones(2, device=SIM)
    late = value.to("cpu", non_blocking=True)
    assert late.isnan().all()
    assert value.to("cpu").tolist() == [1, 1]
    module().synchronize(SIM)
    assert late.tolist() == [1, 1]


def test_a_copy_between_devices_is_ordered_with_both_current_streams(machine: Machine) -> None:
    """As PyTorch has it for CUDA: the target's stream waits for the copy, which waits for it."""
    source = torch.ones(2, device=SIM)
    copy = source.to("sim:1", non_blocking=True)
    (copy + 1).sum()
    machine.defaults[1].synchronize()
    assert contents(copy).tolist() == [1, 1]


def test_views_share_memory_there_too(machine: Machine) -> None:
    whole = torch.zeros(2, 3, device=SIM)
    row = whole[1]
    row.add_(torch.arange(3.0, device=SIM))
    assert whole.t().tolist() == [[0, 0], [0, 1], [0, 2]]
    assert row._version == whole._version


def test_random_numbers_are_those_of_the_time_when_work_is_given(machine: Machine) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    found = torch.rand(3, device=SIM)
    torch.manual_seed(2)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("seed", range(2))
def test_training_has_the_bits_of_the_cpu(seed: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()),
            *(nn.Linear(288, 10), nn.LayerNorm(10)),
        )

    def trained(model: nn.Module, device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [t.cpu() for t in (*losses, *model.state_dict().values())]

    with simulated(seed=seed):
        found = trained(build().to(SIM), SIM)
    wanted = trained(build(), "cpu")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
