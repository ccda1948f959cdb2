"""How much of a device's memory is in use."""

from __future__ import annotations

import torch

from penstock.devices.kinds import kind_of


def in_use(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch has allocated on a device in this process, and the most it had.

    Both are 0 for CPUs, whose memory is not counted by device.
    """
    return kind_of(device).allocated(device)
