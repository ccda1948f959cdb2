"""How the ranks that torchrun has started find each other."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from penstock.board.process import started_at
from penstock.devices.choice import Devices, existing_devices
from penstock.devices.kinds import accelerator, kind_of
from penstock.errors import InputError, WorkerError
from penstock.links.handshake import Address, Listener, call, new_secret, route_to, this_machine
from penstock.links.wire import Wire
from penstock.workers.heartbeat import Beats, HasStopped, Pulse
from penstock.workers.ranks.operations import Ranks
from penstock.workers.ranks.process_groups import init_process_group, on_loopback

_TIMEOUT = 120.0  # seconds in which all ranks have to be there
_MANY = 1 << 20  # more than there are ranks
_BUILDING = 1800.0  # seconds that building a pipeline may take, profiling and planning included

LISTEN = "PENSTOCK_LISTEN"
"""In the environment: the address on which this rank listens to other machines."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun and whatever does as it does: Ray Train, Kubernetes
    ("LOCAL_RANK", "WORLD_SIZE"),  # Lightning's own launcher
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # mpirun of MPICH and Intel MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # of MVAPICH
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun; salloc and sbatch set only the first
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
)
"""The variables in which launchers give a process its rank and the number of ranks.

The first pair that is set counts.
"""

T = TypeVar("T")


class RankEntry(NamedTuple):
    """What all ranks know of a rank.

    Attributes:
        machine: an identifier of its machine; ranks with the same one are on the same machine.
        host: the name of its machine.
        pid: of its process.
        device: its own, as its machine names it.
        cores: the number of CPU cores that its process may use.
        secret: that it proposes for connections; the one of rank 0 is used.
        started: when its process started, as `started_at` says.
        group: the number of torchrun's agent that has started it; empty without one.
        devices: the names of the accelerators that its process may use, by number.
    """

    machine: str
    host: str
    pid: int
    device: str
    cores: int
    secret: str
    started: int
    group: str = ""
    devices: tuple[str, ...] = ()


class Others(NamedTuple):
    """How a rank gets to the others.

    Attributes:
        rank: this one.
        listener: where others connect to it.
        entries: of all ranks.
        addresses: where each can be reached.
        master: names of the machine of rank 0.
    """

    rank: int
    listener: Listener
    entries: Sequence[RankEntry]
    addresses: Sequence[Address]
    master: Sequence[str]

    def near(self, one: int, other: int) -> bool:
        """Whether two ranks are on one machine."""
        return self.entries[one].machine == self.entries[other].machine

    def connect(self, peers: dict[int, int]) -> dict[int, Wire]:
        """Connect to other ranks, all of which do the same.

        Args:
            peers: the rank at the other end, by a number of the connection that both ends know.

        Raises:
            TimeoutError: one cannot be reached.
        """
        calling = {n: peer for n, peer in peers.items() if self._calls(self.rank, peer)}
        found = {n: self._call(peer, n) for n, peer in calling.items()}
        expected = [(peer, n) for n, peer in peers.items() if n not in calling]
        secret = self.entries[0].secret
        accepted = self.listener.accept(expected, secret, _TIMEOUT)
        return found | {n: wire for (_, n), wire in accepted.items()}

    def _call(self, peer: int, number: int) -> Wire:
        address, secret = self.addresses[peer], self.entries[0].secret
        hosts = [address.host, *(self.master if self.near(peer, 0) else ())]
        return call(address, hosts, (self.rank, number), secret, _TIMEOUT)

    def _calls(self, one: int, other: int) -> bool:
        """Which of two connects to the other: the machine of rank 0 is known to be reachable."""
        if self.near(one, 0) != self.near(other, 0):
            return self.near(other, 0)
        return one > other


class Launch(NamedTuple):
    """The ranks, found.

    Attributes:
        ranks: what they do together.
        others: how this one gets to them.
    """

    ranks: Ranks
    others: Others

    @property
    def entries(self) -> Sequence[RankEntry]:
        """What all know of each rank."""
        return self.others.entries

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.entries[self.ranks.rank].device)


def rendezvous(devices: Devices | None) -> Launch:
    """Find the other ranks.

    Args:
        devices: of all ranks; `None`, or their number, leaves each rank its own.

    Raises:
        InputError: there are none, or not as many as devices.
        DeviceError: this rank's device does not exist.
        WorkerError: they did not find each other.
    """
    _init()
    rank, count = dist.get_rank(), dist.get_world_size()
    if isinstance(devices, int) and devices == count:
        devices = None
    if devices is not None and (isinstance(devices, (str, int)) or len(devices) != count):
        raise InputError(
            f"devices={devices!r}, and torchrun has started {count} ranks: give one for each rank, "
            "or leave devices out"
        )
    device = existing_devices([_own_device() if devices is None else devices[rank]])[0]
    cores = len(os.sched_getaffinity(0))
    me = this_machine(), socket.gethostname(), os.getpid(), str(device), cores
    group = os.environ.get("GROUP_RANK", "")
    mine = RankEntry(*me, new_secret(), started_at(), group, identities(device))
    try:
        return launched(_introduced(rank, mine))
    except (RuntimeError, OSError) as error:
        raise WorkerError(None, None, "rendezvous", error) from error


class _Listens(NamedTuple):
    """Where a rank listens, or why it cannot."""

    address: Address
    problem: str


def launched(others: Others) -> Launch:
    """Connect a rank to rank 0, and rank 0 to all others, who all do the same.

    Args:
        others: how it gets to them; its listener is closed if that fails.

    Raises:
        TimeoutError: one cannot be reached.
    """
    rank, count = others.rank, len(others.entries)
    try:
        star = {(k or rank): k for k in (range(1, count) if rank == 0 else [0])}
        far = {number: peer for number, peer in star.items() if not others.near(rank, peer)}
        peers = {_control(number): peer for number, peer in star.items()}
        found = others.connect(peers | {_beats(number): peer for number, peer in far.items()})
        wires = {peer: found[_control(number)] for number, peer in star.items()}
        beats = {peer: found[_beats(number)] for number, peer in far.items()}
        names = [f"rank {k} (process {e.pid} on {e.host})" for k, e in enumerate(others.entries)]
        ranks = Ranks(rank, names, wires, _BUILDING, _pulses(others, wires, beats))
        with ranks.operation("the start of a pipeline"):
            ranks.end(None)
        return Launch(ranks, others)
    except BaseException:
        others.listener.close()
        raise


def _introduced(rank: int, mine: RankEntry) -> Others:
    """Tell all ranks who this one is and where it can be reached, and hear the same of them."""
    backend = "gloo" if dist.is_gloo_available() else None
    with on_loopback():
        everybody: dist.ProcessGroup = dist.new_group(
            backend=backend, timeout=timedelta(seconds=_TIMEOUT)
        )
    try:
        entries = _gathered(mine, everybody)
        master = [os.environ.get("MASTER_ADDR", "localhost"), entries[0].host]
        listener, addresses = _listening(rank, entries, master, everybody)
        return Others(rank, listener, entries, addresses, master)
    finally:
        dist.destroy_process_group(everybody)


def _control(rank: int) -> int:
    """The number of a rank's connection to rank 0; links have those from 0."""
    return -rank


def _beats(rank: int) -> int:
    """The number of another one, for heartbeats, if the two are on different machines."""
    return -_MANY - rank


def _pulses(
    others: Others, near: Iterable[int], beats: Mapping[int, Wire]
) -> dict[int, HasStopped]:
    """For ranks at the other ends of this rank's wires, what shows whether they are stopped.

    On the same machine it is a look at the process, on other machines a heartbeat.

    Args:
        others: all ranks.
        near: the ranks at the other ends.
        beats: connections for heartbeats to those of them that are on other machines, by rank.
    """
    known = [(k, others.entries[k]) for k in near if others.near(others.rank, k)]
    found: dict[int, HasStopped] = {k: Pulse(e.pid, e.started) for k, e in known if e.started}
    if beats:
        last = Beats(beats)
        found |= {k: last.of(k) for k in beats}
    return found


def _listening(
    rank: int, entries: Sequence[RankEntry], master: Sequence[str], group: dist.ProcessGroup
) -> tuple[Listener, Sequence[Address]]:
    """Listen to the other ranks; to those of other machines on the address by which they know us.

    Returns:
        where others connect to this rank, and all ranks' addresses.

    Raises:
        InputError: a rank has no address where others can reach it.
    """
    machine = entries[0].machine
    elsewhere = [k for k, entry in enumerate(entries) if entry.machine != machine]
    host, problem = None, ""
    if elsewhere:
        routes = _gathered(route_to(master) if rank in elsewhere else ("", ""), group)
        host = routes[rank][1] if rank in elsewhere else routes[elsewhere[0]][0]
    try:
        listener = Listener(os.environ.get(LISTEN, host) if elsewhere else None)
    except OSError as error:
        listener = Listener()
        problem = (
            f"rank {rank} cannot listen on {os.environ.get(LISTEN, host)!r}, by which other "
            f"machines seem to know its own: {error}. Set MASTER_ADDR to an address of the "
            f"machine of rank 0 that all others can reach, or {LISTEN} to one of this rank's "
            "machine (0.0.0.0 for all that it has)"
        )
    address = listener.address._replace(host=host or "")
    found = _gathered(_Listens(address, problem), group)
    if problems := [listens.problem for listens in found if listens.problem]:
        listener.close()
        raise InputError(problems[0])
    return listener, [listens.address for listens in found]


def _gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """What all ranks have of something; as JSON, so that nothing has to be unpickled."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    content = msgspec.json.encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    kind = type(value)
    return [msgspec.json.decode(bytes(text.cpu().numpy()), type=kind) for text in texts]


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
    init_process_group()


def identities(device: torch.device) -> tuple[str, ...]:
    """The names of all devices of this kind that this process may use, by number."""
    kind = kind_of(device)
    return tuple(map(kind.identity, kind.devices())) if kind.can_share else ()


def _own_device() -> str:
    kind = accelerator()
    if kind is None:
        return "cpu"
    devices = kind.devices()
    return str(devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)])


def is_torchrun() -> bool:
    """Whether this process is one of several that torchrun has started."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def is_ray_train() -> bool:
    """Whether this process is one of several workers of Ray Train, with a process group."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    package = sys.modules.get("ray")  # which a worker of Ray has imported
    if not several or package is None or not (dist.is_available() and dist.is_initialized()):
        return False
    return package.is_initialized() and bool(package.get_runtime_context().get_actor_id())


def check_is_alone() -> None:
    """Raise if this process is one of several, of which each would train the whole model.

    Raises:
        InputError: there are others, by what `torch.distributed` or the environment say.
    """
    rank, count, how = _launched_by()
    if count > 1:
        raise InputError(
            f"this process is rank {rank} of {count} ({how}), and each of them would train the "
            'whole model by itself, without the others. Give workers="torchrun" to let the ranks '
            "be the workers, one stage or more on each (without torchrun, call "
            'torch.distributed.init_process_group first); or workers="threads" or "processes" if '
            "each rank is to have a pipeline of its own"
        )


def _launched_by() -> tuple[int, int, str]:
    """The rank of this process, of how many, and how that is known."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), "torch.distributed has a process group"
    for rank, count in _LAUNCHERS:
        if os.environ.get(rank, "").isdecimal() and os.environ.get(count, "").isdecimal():
            found = int(os.environ[rank]), int(os.environ[count])
            return *found, f"{count}={found[1]} in the environment"
    return 0, 1, ""
