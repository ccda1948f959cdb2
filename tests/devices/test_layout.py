"""Copies are aligned as what they are copies of, here and on devices of other kinds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.devices.layout import alike


@pytest.mark.parametrize("first", [0, 1, 5, 70])
@pytest.mark.parametrize("shift", [0, 4, 20])
def test_a_part_is_aligned_as_on_the_other_device(first: int, shift: int) -> None:
    """There the whole would begin at a multiple of 512 bytes; here it begins anywhere."""
    memory = np.zeros(4096 + 256, np.uint8)
    begin = -memory.ctypes.data % 256 + shift
    whole = torch.from_numpy(memory[begin : begin + 4000].view(np.float32))
    part = whole[first : first + 9]
    assert part.data_ptr() % 256 == (shift + 4 * first) % 256
    made: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.clone())
        return made[0]

    there = alike(part, copy, to=torch.device("cuda"))
    assert there.data_ptr() - made[0].data_ptr() == 4 * first % 256
    assert torch.equal(there, part)


@pytest.mark.parametrize("first", [0, 1, 5, 70])
def test_a_part_is_aligned_as_it_is_on_its_own_device(first: int) -> None:
    whole = torch.arange(200.0)
    copy = alike(whole[first:], torch.clone)
    assert copy.data_ptr() % 64 == whole[first:].data_ptr() % 64
    assert torch.equal(copy, whole[first:])
