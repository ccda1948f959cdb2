"""The process groups of the links between machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.errors import InputError
from penstock.links.process_group import Peer

_TIMEOUT = timedelta(seconds=120)  # to have a group; a wait for a message has its own
_NEVER = timedelta(days=365)  # NCCL ends the process when a receive that is posted ahead waits long


class Groups:
    """A group for either direction of every link between machines. All ranks must make them.

    Args:
        pairs: the ranks of every such link, by its number.
        devices: of all ranks.
        rank: this one.

    Attributes:
        backends: of every link.
        peers: the other ends of this rank's links.
    """

    def __init__(
        self, pairs: Mapping[int, tuple[int, int]], devices: Sequence[torch.device], rank: int
    ) -> None:
        self.backends: dict[int, str] = {}
        self.peers: dict[int, Peer] = {}
        for k, (one, other) in pairs.items():
            backend = self.backends[k] = backend_for(devices[one], devices[other])
            both, timeout = sorted((one, other)), _TIMEOUT if backend != "nccl" else _NEVER
            there = dist.new_group(both, backend=backend, timeout=timeout)
            back = dist.new_group(both, backend=backend, timeout=timeout)
            if rank in (one, other):
                memory = devices[rank] if backend == "nccl" else torch.device("cpu")
                out, into = (there, back) if rank == one else (back, there)
                self.peers[k] = Peer(other if rank == one else one, out, into, memory)


def backend_for(one: torch.device, other: torch.device) -> str:
    """What carries values between two devices of different machines.

    Raises:
        InputError: this torch has nothing that does.
    """
    if "mpi" in dist.get_backend():
        return "mpi"
    if one.type == other.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    if not dist.is_gloo_available():
        raise InputError(
            f"this torch has no backend for {one} and {other}: it was built without gloo"
        )
    return "gloo"
