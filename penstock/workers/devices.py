"""The devices that a pipeline is given."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from penstock.errors import DeviceError, InputError


def existing_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """The devices, each of which this machine has.

    Raises:
        DeviceError: one does not exist.
        InputError: there are none.
    """
    if isinstance(devices, str) or not devices:
        raise InputError(f'devices={devices!r} is no list of devices; give devices=["cpu", "cpu"]')
    found = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"{name!r} is not a device: {_known_devices()}") from error
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if device.type not in ("cpu", "cuda") or (device.index or 0) >= count:
            raise DeviceError(f"there is no device {str(device)!r} here: {_known_devices()}")
        found.append(torch.device("cpu") if device.type == "cpu" else device)
    return found


def _known_devices() -> str:
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return f"this machine has {', '.join(names)}"


def threads_per_worker(devices: Sequence[torch.device | str]) -> int:
    """A CPU worker's share of the cores that this process may use, at least one."""
    workers = sum(torch.device(device).type == "cpu" for device in devices)
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))
