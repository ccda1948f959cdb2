"""Values that cross between processes in memory of devices: bits, strides, who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from penstock.devices.kinds import kind_of
from penstock.devices.streams import Copies
from penstock.links.device_memory import DeviceSlots, can_cross, link_in_words
from penstock.links.segment import TensorPlace, shift_of
from penstock.links.slots import laid_out
from tests.interleavings.running import one_core
from tests.support.simulated.apart import End, across, connected, sharing
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

install()

ONE, OTHER = torch.device("sim:0"), torch.device("sim:1")
SEEDS = range(12)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_core(), sharing():
        yield


def odd(device: torch.device) -> list[torch.Tensor]:
    """Tensors that are not simply contiguous; the same every time."""
    torch.manual_seed(0)
    whole = [torch.randn(*size) for size in ((3, 4), (4, 3), (2, 3, 4, 5), (8, 8), (8, 24), (64,))]
    plain, turned, image, wide, wider, line = (tensor.to(device) for tensor in whole)
    return [
        plain,
        turned.t(),
        image.permute(0, 2, 3, 1),
        wide[:, 2:6],
        wider[:, 4:8],
        line[3:20],
        line[5:9].view(4, 1).expand(4, 3),
        torch.arange(5).to(device),
        torch.tensor(True).to(device),
        torch.empty(0, 3).to(device),
        line[1:8].to(torch.bfloat16),
        torch.tensor(2.0).to(device),
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("devices", [(ONE, OTHER), (ONE, ONE)])
def test_tensors_arrive_as_they_were(devices: tuple[torch.device, ...], seed: int) -> None:
    wanted = odd(torch.device("cpu"))
    with simulated(seed=seed) as machine:
        ends = connected(*devices)
        sent = odd(ONE)
        found = across(ends, *sent, None, "text")
        assert found[-2:] == (None, "text")
        for there, here in zip(found, wanted, strict=False):
            assert there.device == devices[1]
            assert torch.equal(there.cpu(), here)
            assert there.dtype == here.dtype
            assert there.stride() == here.stride()
        assert "download" in {name for _, name in machine.order}  # by this test alone


def test_tensors_begin_as_far_behind_an_alignment_as_on_their_device() -> None:
    with simulated():
        sent = odd(ONE)
        layout, _ = laid_out(sent, alignment=DeviceSlots.alignment)
        places = [place for place in layout if isinstance(place, TensorPlace)]
        assert [p.offset % 256 for p in places] == [shift_of(tensor) for tensor in sent]
        assert any(place.offset % 64 for place in places)


def test_values_without_elements_need_no_memory() -> None:
    with simulated():
        ends = connected(ONE, OTHER)
        (found,) = across(ends, torch.empty(0, 3, device=ONE))
        assert found.shape == (0, 3)
        assert found.device == OTHER
        assert ends[0].sender._slots._slots == []


def test_nothing_goes_by_way_of_the_cpu() -> None:
    with simulated(seed=1) as machine:
        ends = connected(ONE, OTHER)
        x = torch.ones(100, device=ONE) * 2
        before = len(machine.order)
        for _ in range(3):
            (y,) = across(ends, x)
        machine.run_all()
        assert not {"upload", "download"} & {name for _, name in machine.order[before:]}
        assert y.cpu().eq(2).all()


def test_requires_grad_arrives() -> None:
    with simulated():
        ends = connected(ONE, OTHER)
        weight = nn.Parameter(torch.ones(3, device=ONE))
        found = across(ends, weight, weight * 2, weight.detach())
        assert [value.requires_grad for value in found] == [True, True, False]
        assert all(value.is_leaf for value in found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_is_used_again_as_soon_as_the_copies_were_given_to_the_device(seed: int) -> None:
    with simulated(seed=seed) as machine:
        ends = connected(ONE, OTHER)
        x = torch.zeros(1000, device=ONE)
        found = []
        for _ in range(6):
            x = x + 1
            found += across(ends, x)
        assert len(ends[0].sender._slots._slots) == 1
        machine.run_all()
        assert [int(value.cpu()[0]) for value in found] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_sent_may_be_written_after_a_wait(seed: int) -> None:
    with simulated(seed=seed):
        ends = connected(ONE, OTHER)
        weight = torch.ones(1000, device=ONE)
        ends[0].sender.put((weight,))
        ends[0].sender.wait_for_copies()
        weight.fill_(7)
        (found,) = ends[1].receiver.get()
        assert found.cpu().eq(1).all()


def test_values_of_jobs_that_were_given_up_free_their_slots() -> None:
    with simulated():
        one, other = connected(ONE, OTHER)
        for _ in range(3):
            one.sender.put((torch.ones(10, device=ONE),))
        one.dispatch = other.dispatch = 1
        one.sender.put((torch.full((10,), 5.0, device=ONE),))
        (found,) = other.receiver.get()
        assert found.cpu().eq(5).all()
        assert not any(slot.lent for slot in one.sender._slots._slots)


def test_values_of_the_cpu_go_along() -> None:
    with simulated():
        ends = connected(ONE, OTHER)
        found = across(ends, torch.arange(4), torch.ones(2, device=ONE))
        assert [value.device for value in found] == [OTHER, OTHER]
        assert found[0].cpu().tolist() == [0, 1, 2, 3]


def test_a_stage_on_the_cpu_has_memory_of_the_cpu() -> None:
    with simulated():
        cpu = torch.device("cpu")
        assert can_cross(ONE, OTHER)
        assert not can_cross(ONE, cpu)
        assert not can_cross(cpu, cpu)
        assert link_in_words(ONE, OTHER) == "shared memory (sim)"
        assert link_in_words(ONE, cpu) == "shared memory"
        ends = connected(ONE, cpu)
        (found,) = across(ends, torch.full((3,), 4.0, device=ONE))
        assert found.device == cpu
        assert found.eq(4).all()


def test_neither_end_waits_for_a_copy_that_it_does_not_need() -> None:
    """Four values are made in 1 s each; a copy into a slot takes 0.5 s, and one out of it as long.

    The receiver computes with each for 1 s: the last comes after 4 s and two copies.
    """
    seconds = {"aten.mul.Tensor": 1.0, "aten.copy_.default": 0.5, "copy": 0.5}
    with simulated(Machine(2, 3, seconds=seconds)):
        ends = connected(ONE, OTHER)
        kinds = kind_of(ONE).current_stream(ONE), kind_of(OTHER).current_stream(OTHER)
        x = torch.ones(1000, device=ONE)
        for _ in range(4):
            x = x * 2
            (y,) = across(ends, x)
            y = y * 2
        kind_of(ONE).synchronize(ONE)
        kind_of(OTHER).synchronize(OTHER)
        assert kinds[0].clock == 4.0
        assert kinds[1].clock == 6.0
        assert y.cpu().eq(32).all()


def test_two_threads_are_two_processes() -> None:
    """Values there and back, as gradients go, while both ends go on."""
    with simulated(seed=5):
        one, other = connected(ONE, OTHER)

        def answer(end: End) -> None:
            with kind_of(OTHER).on(OTHER):
                for _ in range(5):
                    (value,) = end.receiver.get()
                    end.sender.put((value + 1,))

        thread = threading.Thread(target=answer, args=(other,))
        thread.start()
        x = torch.zeros(50, device=ONE)
        for _ in range(5):
            one.sender.put((x,))
            (x,) = one.receiver.get()
        thread.join()
        assert x.device == ONE
        assert x.cpu().eq(5).all()


def test_a_slot_is_free_if_there_is_no_memory_for_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated():
        one, other = connected(ONE, OTHER)
        for _ in range(2):
            one.sender.put((torch.ones(10, device=ONE),))
        with monkeypatch.context() as patched:
            patched.setattr(Copies, "_moved", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                other.receiver.get()
        (found,) = other.receiver.get()
        assert found.cpu().eq(1).all()
        assert not any(slot.lent for slot in one.sender._slots._slots)


def test_values_that_are_pickled_go_along() -> None:
    """Sparse ones on a device, of which it does not keep who uses them."""
    with simulated(), pytest.MonkeyPatch.context() as patched:
        ends = connected(ONE, OTHER)
        used: list[torch.Tensor] = []
        patched.setattr(
            "penstock.links.device_memory.used_on", lambda stream, values: used.extend(values)
        )
        sparse, dense = torch.eye(3).to_sparse(), torch.ones(2, device=ONE)
        found = across(ends, sparse, dense)
        assert torch.equal(found[0].to_dense(), torch.eye(3))
        assert [value is dense for value in used] == [True]


def test_memory_that_cannot_be_shared_is_an_error_and_frees_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated():
        slots = DeviceSlots(ONE)

        def refuse(self: object, tensor: torch.Tensor) -> None:
            raise RuntimeError("expandable segments cannot be shared")

        monkeypatch.setattr(type(kind_of(ONE)), "shared", refuse)
        with pytest.raises(RuntimeError, match="cannot be shared"):
            slots.lend(100)
        assert slots._slots == []
