"""Which kind a device is of, and which accelerator this machine has."""

from __future__ import annotations

import torch

from penstock.devices.accelerator import Accelerator
from penstock.devices.cpu import Cpu
from penstock.devices.cuda import Cuda
from penstock.devices.kind import DeviceKind


def kind_of(device: torch.device | str) -> DeviceKind:
    """The kind of a device."""
    type = torch.device(device).type
    if type in ("cpu", "meta"):  # `meta` has no values, so there is nothing to wait for either
        return Cpu()
    return Cuda() if type == "cuda" else Accelerator(type)


def accelerator() -> Accelerator | None:
    """What this machine has beside CPUs, if pipelines can use it; `None` if there is nothing.

    PyTorch has one kind in a process. Some have no streams (`mps`), so pipelines do not use them.
    """
    if torch.cuda.is_available():
        return Cuda()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "cuda":
        return None
    kind = Accelerator(found.type)
    return kind if kind.is_complete() and kind.count() else None


def all_devices() -> list[torch.device]:
    """The CPU, and all devices of the accelerator."""
    kind = accelerator()
    return [torch.device("cpu"), *(kind.devices() if kind else [])]
