"""The devices that a pipeline is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.devices.cores import cores
from penstock.devices.kinds import accelerator, all_devices, kind_of
from penstock.errors import DeviceError, InputError

Devices = Sequence[str | torch.device] | int
"""One device for each worker; or how many: the first GPUs, where there are any, or CPU workers."""


def device_choices(devices: Devices | None, least: int = 1) -> list[list[torch.device]]:
    """The lists of devices from which a plan chooses one.

    There is one list if the devices are given, or if there are GPUs: all of them. Else there are
    lists of CPU workers, which share the cores of this process: `least` of them, twice as many, and
    so on, as long as each has a core.

    Args:
        devices: what the user gives.
        least: the number of CPU workers in the shortest list.

    Raises:
        DeviceError: one does not exist.
        InputError: there are none.
    """
    if devices is not None:
        return [existing_devices(devices)]
    if kind := accelerator():
        return [kind.devices()]
    numbers = [least]
    while 2 * numbers[-1] <= cores():
        numbers.append(2 * numbers[-1])
    return [[torch.device("cpu")] * number for number in numbers]


def existing_devices(devices: Devices) -> list[torch.device]:
    """The devices, each of which this machine has.

    Raises:
        DeviceError: one does not exist.
        InputError: there are none.
    """
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        kind = accelerator()
        devices = [f"{kind.type}:{k}" if kind else "cpu" for k in range(devices)]
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InputError(
            f"devices={devices!r} is not a list of devices; give "
            'devices=["cpu", "cpu"], or devices=2'
        )
    found = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"{name!r} is not a device: {_known_devices()}") from error
        if kind_of(device).has_streams:
            device = torch.device(device.type, device.index or 0)
        elif device.type == "cpu" and not device.index:
            device = torch.device("cpu")
        if device not in all_devices():
            raise DeviceError(f"there is no device {str(device)!r} here: {_known_devices()}")
        found.append(device)
    return found


def _known_devices() -> str:
    return f"this machine has {', '.join(map(str, all_devices()))}"


def threads_per_worker(devices: Sequence[torch.device | str]) -> int:
    """A CPU worker's share of the cores that this process may use, at least one."""
    workers = sum(torch.device(device).type == "cpu" for device in devices)
    return max(1, cores() // max(1, workers))
