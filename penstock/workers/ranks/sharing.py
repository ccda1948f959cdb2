"""Which ranks of one machine can have memory of each other's devices: they try it.

A driver may refuse that, in containers for instance, and a number may name another GPU in another
process (`CUDA_VISIBLE_DEVICES`). Values between such ranks go by way of the CPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import torch

from penstock.devices.kinds import kind_of
from penstock.links.device_memory import can_cross
from penstock.workers.ranks.operations import Ranks
from penstock.workers.ranks.rendezvous import RankEntry


def crossing(
    pairs: Mapping[int, tuple[int, int]],
    entries: Sequence[RankEntry],
    ranks: Ranks,
) -> set[int]:
    """The numbers of connections at both ends of which values can stay on devices.

    Args:
        pairs: the ranks at both ends, by the number of the connection.
        entries: of all ranks.
        ranks: all of which call this.
    """
    likely = {k: pair for k, pair in pairs.items() if _may_cross(*(entries[r] for r in pair))}
    if not likely:
        return set()
    me = ranks.rank
    mine = {k: b if a == me else a for k, (a, b) in likely.items() if me in (a, b)}
    with ranks.operation("an offer of memory on devices"):
        offers = {k: _Offer(torch.device(entries[me].device), me) for k in mine}
        every = ranks.end({k: offer.handles for k, offer in offers.items()})
    with ranks.operation("a trial of memory on devices"):
        opened = {k for k, peer in mine.items() if _can_open(every[peer][k], peer)}
        found = ranks.end(opened)
    return {k for k, (a, b) in likely.items() if k in found[a] and k in found[b]}


def _may_cross(one: RankEntry, other: RankEntry) -> bool:
    """Whether two ranks are worth a trial."""
    here, there = torch.device(one.device), torch.device(other.device)
    return (
        one is not other
        and one.machine == other.machine
        and can_cross(here, there)
        and _is_same(here, one, other)
        and _is_same(there, one, other)
    )


def _is_same(device: torch.device, one: RankEntry, other: RankEntry) -> bool:
    """Whether a device has the same number in both processes."""
    names = [entry.devices[(device.index or 0) :][:1] for entry in (one, other)]
    return names[0] == names[1] and names[0] not in ((), ("",))


class _Offer:
    """A byte on this rank's device for another one.

    Args:
        device: the device.
        rank: this one; the byte is its number.

    Attributes:
        handles: what the other one needs; empty if there are none.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        kind = kind_of(device)
        self._memory = torch.full((1,), rank % 256, dtype=torch.uint8, device=device)
        kind.synchronize(device)
        try:
            self._event = kind.new_shared_event(device)
            self.handles = pickle.dumps((kind.shared(self._memory), self._event))
        except RuntimeError:
            self.handles = b""


def _can_open(handles: bytes, rank: int) -> bool:
    """Whether this process can have the memory that a rank offers."""
    if not handles:
        return False
    try:
        memory, _ = pickle.loads(handles)
        return bool(memory.item() == rank % 256)
    except RuntimeError:
        return False
