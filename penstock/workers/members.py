"""Who the workers of a running pipeline are."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Member:
    """A worker's identity in a running pipeline.

    Attributes:
        number: no other member has it or has had it.
        device: its own, as its machine names it.
        place: which of its replica's workers it is, as the plan numbers them.
        replica: whose stages it runs.
        pid: the process that it is, or that it is a thread of.
        host: the name of its machine.
    """

    number: int
    device: torch.device
    place: int
    replica: int
    pid: int
    host: str


def members_here(
    devices: Sequence[torch.device], pids: Sequence[int] = (), per_replica: int = 0
) -> list[Member]:
    """The members of a pipeline whose workers are all on this machine.

    Args:
        devices: of every worker, replica after replica.
        pids: of every worker's process; all are threads of this one if there are none.
        per_replica: how many workers each replica has; all of them if it is 0.
    """
    host = socket.gethostname()
    pids, count = pids or [os.getpid()] * len(devices), per_replica or len(devices)
    return [
        Member(number, device, number % count, number // count, pid, host)
        for number, (device, pid) in enumerate(zip(devices, pids, strict=True))
    ]
