"""How much of a device's memory is in use."""

from __future__ import annotations

import torch


def in_use(device: torch.device) -> tuple[int, int]:
    """Bytes that PyTorch has allocated on a device in this process, and the most it had.

    Both are 0 for CPUs, whose memory is not counted by device.
    """
    if device.type in ("cpu", "meta"):
        return 0, 0
    accelerator = torch.accelerator
    return accelerator.memory_allocated(device), accelerator.max_memory_allocated(device)
