"""What the driver shares with workers on devices other than the CPU: `meta` stands for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.links.segment import TensorPlace, brought
from penstock.workers.processes import shared_model as module
from penstock.workers.processes.shared_model import SharedModel

META = torch.device("meta")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were shared."""
    given: list[torch.Tensor] = []

    def share(tensor: torch.Tensor) -> int:
        given.append(tensor)
        return len(given)

    monkeypatch.setattr(module, "kind_of", lambda device: SimpleNamespace(shared=share))
    return given


def model_of(*layers: nn.Module) -> SharedModel:
    made = SharedModel([META], 1, lambda place, fd: 7)
    made.share(0, [p for layer in layers for p in layer.parameters()])
    return made


def filled(parameters: list[nn.Parameter], of: SharedModel) -> None:
    """What a worker does: all have gradients."""
    part = of._parts[0]
    part.note([p.requires_grad for p in parameters])
    of.after(0, of.during(0))


def test_tensors_stay_where_they_are(shared: list[torch.Tensor]) -> None:
    layer = nn.Linear(3, 2, device=META)
    made = SharedModel([META], 1, lambda place, fd: 7)
    before = [p.data_ptr() for p in layer.parameters()]
    (package,) = made.share(0, list(layer.parameters()))
    assert (package.grant, package.size) == (-1, 0)
    assert [each.shared for each in package.tensors] == [1, 2]
    assert [p.data_ptr() for p in layer.parameters()] == before
    assert made.share(0, list(layer.parameters())) == []


def test_gradients_have_one_slot_until_the_user_keeps_what_is_in_it(
    shared: list[torch.Tensor],
) -> None:
    layer = nn.Linear(3, 2, device=META)
    own = model_of(layer)
    parameters = list(layer.parameters())
    shared.clear()
    first = own.before(0)
    assert first.new_slot is not None
    assert [each.shape for each in shared] == [p.shape for p in parameters]
    filled(parameters, own)
    assert [p.grad is g for p, g in zip(parameters, shared, strict=True)] == [True, True]
    again = own.before(0)  # they are added to
    assert (again.slot, again.new_slot, again.present) == (first.slot, None, (0, 1))
    for p in parameters:
        p.grad = None
    shared.clear()
    assert own.before(0).new_slot is None
    filled(parameters, own)
    kept: Any = parameters[0].grad.view(-1)[1:]  # type: ignore[union-attr]
    for p in parameters:
        p.grad = None
    other = own.before(0)
    assert other.slot != first.slot
    assert other.new_slot is not None
    assert kept.untyped_storage()._cdata not in [g.untyped_storage()._cdata for g in shared]


def test_parameters_that_ask_for_no_gradient_have_no_memory_for_one(
    shared: list[torch.Tensor],
) -> None:
    frozen, layer = nn.Linear(3, 3, device=META).requires_grad_(False), nn.Linear(3, 2, device=META)
    own = model_of(frozen, layer)
    shared.clear()
    assert own.before(0).new_slot is not None
    assert [g.numel() for g in shared] == [0, 0, 6, 2]
    filled([*frozen.parameters(), *layer.parameters()], own)
    before = [p.grad for p in layer.parameters()]
    frozen.weight.requires_grad_(True)
    shared.clear()
    new = own.before(0)
    assert new.new_slot is not None
    assert [g.numel() for g in shared] == [9, 0, 6, 2]
    assert new.present == (2, 3)  # what was there is in the new slot
    assert not any(p.grad is g for p, g in zip(layer.parameters(), before, strict=True))
    shared.clear()
    assert own.before(0).new_slot is None


def test_a_parameter_that_is_frozen_keeps_its_gradient(shared: list[torch.Tensor]) -> None:
    layer = nn.Linear(3, 2, device=META)
    own = model_of(layer)
    own.before(0)
    filled(list(layer.parameters()), own)
    kept = layer.bias.grad
    layer.weight.requires_grad_(False)
    layer.bias.grad = None
    shared.clear()
    new = own.before(0)
    assert new.new_slot is not None
    assert [g.numel() for g in shared] == [6, 2]
    assert new.present == (0,)
    assert all(g is not kept for g in shared)


@pytest.mark.parametrize("keeps", ["gradient", "view", "storage"])
def test_what_the_user_keeps_is_left_alone(shared: list[torch.Tensor], keeps: str) -> None:
    layer = nn.Linear(3, 2, device=META)
    own = model_of(layer)
    slot = own.before(0).slot
    filled(list(layer.parameters()), own)
    gradient: Any = layer.weight.grad
    kept = {"gradient": gradient, "view": gradient[0], "storage": gradient.untyped_storage()}[keeps]
    shared.clear()
    del gradient
    layer.zero_grad()
    assert own.before(0).slot == slot + 1
    del kept
    layer.zero_grad()
    shared.clear()
    assert own.before(0).slot == slot + 1


def test_without_memory_for_a_slot_the_next_pass_tries_again(
    shared: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(3, 2, device=META)
    own = model_of(layer)

    def fails(parameter: nn.Parameter) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_room_for", fails)
        with pytest.raises(torch.OutOfMemoryError):
            own.before(0)
    assert own.before(0).new_slot is not None


def test_a_tensor_elsewhere_is_an_error(shared: list[torch.Tensor]) -> None:
    with pytest.raises(InputError, match="is on cpu, and its worker process on meta"):
        model_of(nn.Linear(3, 2))


@pytest.mark.parametrize("stride", [(12, 1), (1, 0), (1, 4), (0, 0)])
def test_what_is_brought_to_a_device_lies_as_it_did(stride: tuple[int, int]) -> None:
    tensor = torch.zeros(64).as_strided((4, 3), stride)
    copy = brought(tensor, META, shift=20)
    assert (copy.shape, copy.stride(), copy.storage_offset()) == (tensor.shape, stride, 5)


def test_tensors_know_how_far_behind_an_alignment_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Elsewhere:
        """A tensor that begins 300 bytes into memory of a device."""

        dtype, shape, requires_grad, device = torch.float32, torch.Size([2, 2]), False, META

        def stride(self) -> tuple[int, int]:
            return 2, 1

        def data_ptr(self) -> int:
            return 4096 + 300

    place = module.place_of(Elsewhere(), 64)  # type: ignore[arg-type]
    assert place == TensorPlace(torch.float32, (2, 2), (2, 1), 64, False, 300 % 256)
