"""The process groups of `torch.distributed` that ranks use: the default one, and those of links.

*The default group.* torchrun's agent lends the ranks its own store, and keeps the store when it
restarts them. The new processes would find the addresses of the old ones in it, and try to connect
to these. So every attempt uses a part of the store of its own, under a name that is the same on all
ranks. The agent's number of restarts cannot be that name: every agent counts its own, and the
number stays the same when a machine joins.

Every rank writes a random word to the store. Rank 0 reads them, and publishes a new name for the
attempt together with these words. A rank whose word is among them confirms the name. If rank 0 has
read a word of an earlier attempt instead, the rank waits: as soon as rank 0 sees the new word, it
publishes another name. A name counts once all ranks have confirmed it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from penstock.cadence import wait_until
from penstock.errors import InputError
from penstock.links.process_group import Peer

_PREFIX = "penstock"
_TIMEOUT = 300.0  # seconds in which all ranks have to be there, as torch has it
_INTERFACE, _LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
_PAUSE = 0.02  # seconds between two looks
_CONNECT = timedelta(seconds=120)  # to have a group; a wait for a message has its own
_NEVER = timedelta(days=365)  # NCCL ends the process when a receive that is posted ahead waits long


@contextmanager
def on_loopback() -> Iterator[None]:
    """Inside, groups of gloo listen to this machine only, if all ranks are here.

    Whether they are, the launcher says. By default gloo listens on the address of the host's name,
    which others may reach, and it asks for no proof of who connects.
    """
    is_alone = os.environ.get("WORLD_SIZE", "") == os.environ.get("LOCAL_WORLD_SIZE", "none")
    if not is_alone or _INTERFACE in os.environ or not _has_loopback():
        yield
        return
    os.environ[_INTERFACE] = _LOOPBACK
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _has_loopback() -> bool:
    """Whether there is such an interface, and it is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            socket.if_nametoindex(_LOOPBACK)
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True


def init_process_group() -> None:
    """As `torch.distributed.init_process_group("gloo")`, in every attempt of torchrun anew.

    Raises:
        TimeoutError: not all ranks came.
    """
    with on_loopback():
        _init_process_group()


def _init_process_group() -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    store, rank, count = next(rendezvous("env://"))
    part = attempt_of(store, rank, count, _TIMEOUT)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=count)


def attempt_of(store: Store, rank: int, count: int, timeout: float) -> Store:
    """The part of a store for this attempt of these ranks, who all call this.

    Args:
        store: which may have been used by earlier attempts of any number of ranks.
        rank: of this process.
        count: of ranks.
        timeout: seconds.

    Raises:
        TimeoutError: not all ranks came.
    """
    shared = PrefixStore(_PREFIX, store)
    word = secrets.token_hex(8)
    shared.set(f"word {rank}", word)
    look = _leading(shared, count) if rank == 0 else _following(shared, rank, word)
    if not (name := wait_until(look, timeout, _PAUSE)):
        raise TimeoutError(f"rank {rank} waited {timeout:.0f} s for {count - 1} other ranks")
    return PrefixStore(f"{_PREFIX} {name}", store)


def _leading(store: Store, count: int) -> Callable[[], str]:
    """What rank 0 does again and again, until there is a name."""
    name, answered = "", [""] * count

    def look() -> str:
        nonlocal name, answered
        words = [_read(store, f"word {k}") for k in range(count)]
        if all(words) and words != answered:
            name, answered = secrets.token_hex(8), words
            store.set("name", " ".join([name, *words]))
        if not name or any(_read(store, f"knows {k}") != name for k in range(1, count)):
            return ""
        store.set("confirmed", name)
        return name

    return look


def _following(store: Store, rank: int, word: str) -> Callable[[], str]:
    """What the other ranks do again and again, until there is a name."""

    def look() -> str:
        name, *words = _read(store, "name").split() or [""]
        if rank >= len(words) or words[rank] != word:
            return ""
        store.set(f"knows {rank}", name)
        return name if _read(store, "confirmed") == name else ""

    return look


def _read(store: Store, key: str) -> str:
    """What a store has; an empty text if nothing."""
    return store.get(key).decode() if store.check([key]) else ""


class LinkGroups:
    """Two groups for every link between machines, one for each direction.

    All ranks must make them, also those that have no such link.

    Args:
        pairs: the ranks at both ends of every such link, by the link's number.
        devices: of all ranks.
        rank: this one.

    Attributes:
        backends: the name of the backend of every link, by the link's number.
        peers: the other ends of this rank's links, by the link's number.
    """

    def __init__(
        self, pairs: Mapping[int, tuple[int, int]], devices: Sequence[torch.device], rank: int
    ) -> None:
        self.backends: dict[int, str] = {}
        self.peers: dict[int, Peer] = {}
        for k, (one, other) in pairs.items():
            backend = self.backends[k] = backend_for(devices[one], devices[other])
            both, timeout = sorted((one, other)), _CONNECT if backend != "nccl" else _NEVER
            there = dist.new_group(both, backend=backend, timeout=timeout)
            back = dist.new_group(both, backend=backend, timeout=timeout)
            if rank in (one, other):
                memory = devices[rank] if backend == "nccl" else torch.device("cpu")
                out, into = (there, back) if rank == one else (back, there)
                self.peers[k] = Peer(other if rank == one else one, out, into, memory)

    def close(self) -> None:
        """Close this rank's groups of gloo, which listen and are connected as long as they are.

        Those of other backends do not listen, and stay until the process ends: what is awaited
        ahead in a group of NCCL cannot be given up.
        """
        for k, peer in self.peers.items():
            for group in (peer.out, peer.back) if self.backends[k] == "gloo" else ():
                with suppress(ValueError):  # the script has destroyed all groups
                    dist.destroy_process_group(group)
        self.peers = {}


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
