"""How the ranks that torchrun has started find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import InputError, WorkerError
from penstock.links.meeting import Address, Meeting, call, new_secret
from penstock.links.wire import Wire
from penstock.workers.devices import existing_devices
from penstock.workers.ranks import Ranks

_TIMEOUT = 120.0  # seconds in which all ranks have to be there
_BUILDING = 1800.0  # seconds that building a pipeline may take, profiling and planning included
_CONTROL = -1  # the number of the connection to rank 0; links have theirs

DEVICES = Sequence[str | torch.device]


class Entry(NamedTuple):
    """What all know of a rank.

    Attributes:
        address: where it can be reached.
        host: the name of its machine.
        pid: of its process.
        device: its own, as its machine names it.
        cores: that its process may use.
    """

    address: Address
    host: str
    pid: int
    device: str
    cores: int


class Launch(NamedTuple):
    """The ranks, found.

    Attributes:
        ranks: what they do together.
        meeting: where others connect to this one.
        entries: of all ranks.
        hosts: where the machine of each can be reached.
        secret: that they share.
    """

    ranks: Ranks
    meeting: Meeting
    entries: Sequence[Entry]
    hosts: Sequence[Sequence[str]]
    secret: str

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device(self.entries[self.ranks.rank].device)

    def near(self, one: int, other: int) -> bool:
        """Whether two ranks are on one machine."""
        return self.entries[one].address.machine == self.entries[other].address.machine

    def connect(self, peers: dict[int, int]) -> dict[int, Wire]:
        """Connect to other ranks, all of which do the same.

        Args:
            peers: the rank at the other end, by a number of the connection that both ends know.

        Raises:
            TimeoutError: one cannot be reached.
        """
        me = self.ranks.rank
        calling = {n: peer for n, peer in peers.items() if self._calls(me, peer)}
        found = {
            n: call(self.entries[peer].address, self.hosts[peer], (me, n), self.secret, _TIMEOUT)
            for n, peer in calling.items()
        }
        expected = [(peer, n) for n, peer in peers.items() if n not in calling]
        for (_, n), (wire, _) in self.meeting.accept(expected, self.secret, _TIMEOUT).items():
            found[n] = wire
        return found

    def _calls(self, one: int, other: int) -> bool:
        """Which of two connects to the other: the machine of rank 0 is known to be reachable."""
        if self.near(one, 0) != self.near(other, 0):
            return self.near(other, 0)
        return one > other


def join(devices: DEVICES | None) -> Launch:
    """Find the other ranks.

    Args:
        devices: of all ranks; `None` leaves each rank its own.

    Raises:
        InputError: there are none, or not as many as devices.
        DeviceError: this rank's device does not exist.
        WorkerError: they did not find each other.
    """
    _init()
    rank, count = dist.get_rank(), dist.get_world_size()
    if devices is not None and (isinstance(devices, str) or len(devices) != count):
        raise InputError(
            f"devices={devices!r}, and torchrun has started {count} ranks: give one for each rank, "
            "or leave devices out"
        )
    meeting = Meeting()
    device = existing_devices([_own_device() if devices is None else devices[rank]])[0]
    cores = len(os.sched_getaffinity(0))
    entry = Entry(meeting.address, socket.gethostname(), os.getpid(), str(device), cores)
    try:
        return _found(rank, count, meeting, entry)
    except (RuntimeError, OSError) as error:
        meeting.close()
        raise WorkerError(None, None, "joining", error) from error


def _found(rank: int, count: int, meeting: Meeting, entry: Entry) -> Launch:
    everybody: Any = dist.new_group(
        backend="gloo" if dist.is_gloo_available() else None, timeout=timedelta(seconds=_TIMEOUT)
    )
    said: list[Any] = [None] * count
    dist.all_gather_object(said, (entry, new_secret()), group=everybody)
    dist.destroy_process_group(everybody)
    entries, secret = [entry for entry, _ in said], said[0][1]
    names = [f"rank {k} (process {e.pid} on {e.host})" for k, e in enumerate(entries)]
    master = [os.environ.get("MASTER_ADDR", "localhost"), entries[0].host]
    seen: dict[int, str] = {}
    if rank == 0:
        expected = [(other, _CONTROL) for other in range(1, count)]
        callers = meeting.accept(expected, secret, _TIMEOUT)
        wires = {caller: wire for (caller, _), (wire, _) in callers.items()}
        seen = {caller: ip for (caller, _), (_, ip) in callers.items()}
    else:
        wires = {0: call(entries[0].address, master, (rank, _CONTROL), secret, _TIMEOUT)}
    ranks = Ranks(rank, names, wires, _BUILDING)
    with ranks.together("the start of a pipeline"):
        seen = ranks.settle(seen)[0]
    hosts = [[seen[k]] if seen.get(k) else master for k in range(count)]
    return Launch(ranks, meeting, entries, hosts, secret)


def _init() -> None:
    """Have a default process group; the user's, if there is one.

    Raises:
        InputError: the environment says nothing of other ranks.
    """
    if dist.is_initialized():
        return
    missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if missing:
        raise InputError(
            f'workers="torchrun" needs {", ".join(sorted(missing))} in the environment: start the '
            "script with torchrun --nproc-per-node 2 script.py, or call "
            "torch.distributed.init_process_group first"
        )
    dist.init_process_group("gloo")


def _own_device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return f"cuda:{local % torch.cuda.device_count()}"


def is_torchrun() -> bool:
    """Whether this process is one of several that torchrun has started."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
