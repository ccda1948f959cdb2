"""What a peer is, and the local processes that peers run in.

A peer is started once and then runs one training step for each call of `step()`, so that those who
are compared can take turns; between its steps its processes wait without using a processor. A
process builds one servant, an object whose methods are the commands, and then blocks on its pipe
until it is sent what to run. Every wait of the owner has a timeout; a process that raises or dies
is a `PeerError` in the owner that names it and carries its traceback. No process outlives its
owner.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from penstock.devices.allocator import keep_freed_memory
from penstock.devices.kinds import kind_of

HOST = "127.0.0.1"

# Seconds that the others get to say what they know once one process has failed: a rank that is
# only a victim ("connection closed by peer") is often quicker than the one at fault.
_LAST_WORDS = 1.0

# Seconds that a process gets to leave by itself before it is killed.
_FAREWELL = 5.0

_BECOME = "build"  # the command for another servant


class Servant(Protocol):
    """The object that a process serves; its methods are the commands."""

    def close(self) -> None:
        """Release what it holds; its process ends, or builds another servant."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among its peers.

    Attributes:
        rank: its number, from 0.
        size: how many processes there are.
        port: where the rendezvous store of all of them listens, on `HOST`.
        timeout: seconds that any wait for another process may take.
        life: the number of the servant in its process, from 0; see `PeerProcesses.become`.
    """

    rank: int
    size: int
    port: int
    timeout: float
    life: int = 0

    def join(self, devices: Sequence[str] = ()) -> torch.device:
        """Make this process a rank of the default process group, and return its device.

        Ranks talk over gloo on loopback. If each has a GPU of its own, they talk by what PyTorch
        uses for these, such as NCCL.

        Args:
            devices: of the ranks, by number; CPUs if there are none.
        """
        device = torch.device(devices[self.rank] if devices else "cpu")
        patience = timedelta(seconds=self.timeout)
        backend = "gloo"
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
            if len(set(devices)) == len(devices):
                backend = dist.get_default_backend_for_device(device)
        store = dist.TCPStore(HOST, self.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        own = dist.PrefixStore(f"life {self.life}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=own, rank=self.rank, world_size=self.size, timeout=patience
        )
        return device


Build = Callable[[Place], Servant]


@dataclass(frozen=True)
class Recipe:
    """A peer that is not started yet.

    Attributes:
        name: what it is called.
        builds: what each rank builds; picklable.
        threads: intra-op threads of each process.
        environment: more environment variables for the processes.
    """

    name: str
    builds: Sequence[Build]
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> Peer:
        """Start its processes.

        Raises:
            PeerError: a process failed or died while it was starting.
        """
        return Peer(self.name, self.builds, threads=self.threads, environment=self.environment)

    def has_processes_of(self, other: Recipe) -> bool:
        """Whether the processes of another peer can be this one's."""
        ours = (len(self.builds), self.threads, dict(self.environment))
        return ours == (len(other.builds), other.threads, dict(other.environment))


class _Member(NamedTuple):
    """The owner's end of one process."""

    process: Any  # a SpawnProcess, which typeshed does not export
    connection: Connection


class PeerError(RuntimeError):
    """A process of a peer failed, died or did not answer in time.

    Attributes:
        reason: in one line, what it was; of several that failed, of the one at fault.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def reason_of(error: BaseException) -> str:
    """What an error says, in one line; of a `PeerError`, what the process at fault raised."""
    if isinstance(error, PeerError):
        return error.reason
    return " ".join("".join(traceback.format_exception_only(error)).split())


class _Failure(NamedTuple):
    """What went wrong in a process: all of it, and in one line."""

    text: str
    reason: str

    @property
    def is_of_another(self) -> bool:
        """Whether it says no more than that another process is gone."""
        return "gloo/transport" in self.reason


class _Reply(NamedTuple):
    """A process's answer to a command: its value, or what went wrong."""

    value: Any
    failure: _Failure | None = None


class PeerProcesses:
    """One process per item of `builds`, each serving the commands of the servant it built.

    Args:
        name: what error messages call these processes.
        builds: what each rank builds; picklable.
        threads: intra-op threads of each process.
        timeout: seconds that any wait may take, for a start or for a command.
        environment: more environment variables for the processes.

    Raises:
        PeerError: a process failed or died while it was starting.
    """

    def __init__(
        self,
        name: str,
        builds: Sequence[Build],
        *,
        threads: int = 1,
        timeout: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._timeout = timeout
        self._lives = 1
        self._members: list[_Member] = []
        # The owner serves the rendezvous, on a port that the system picks: no race for it.
        self._store: Any = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = get_context("spawn")
        try:
            with _environment(_variables(threads) | dict(environment or {})):
                for rank, build in enumerate(builds):
                    ours, theirs = context.Pipe()
                    place = Place(rank, len(builds), self._store.port, timeout)
                    process = context.Process(
                        target=_serve,
                        args=(theirs, place, build, threads),
                        name=f"{name} rank {rank}",
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self._members.append(_Member(process, ours))
            self._collect("start")
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [member.process.pid for member in self._members]

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Run `command` on every rank at once, with these arguments; the answers by rank.

        Raises:
            PeerError: a process raised, died or did not answer in time. All are ended.
            RuntimeError: it is closed.
        """
        return self._all(command, [arguments] * len(self._members))

    def become(self, name: str, builds: Sequence[Build]) -> None:
        """Replace the servants by others in the same processes, which need not import torch again.

        Args:
            name: what error messages call the processes from now on.
            builds: what each rank builds; picklable.

        Raises:
            PeerError: as `call`.
        """
        self.name = name
        self._all(_BECOME, [(build, self._lives) for build in builds])
        self._lives += 1

    def _all(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a command on every rank at once, with its own arguments; the answers by rank."""
        if not self._members:
            raise RuntimeError(f"{self.name} is closed")
        for member, own in zip(self._members, arguments, strict=True):
            with suppress(OSError):  # a dead process is reported below, with its exit status
                member.connection.send((command, own))
        try:
            return self._collect(command)
        except BaseException:
            self.close(at_once=True)
            raise

    def close(self, *, at_once: bool = False) -> None:
        """End every process: by itself within a few seconds, or `at_once`. May be repeated."""
        members, self._members = self._members, []
        for member in members:
            if at_once:
                member.process.kill()
            else:
                with suppress(OSError):
                    member.connection.send(None)
        deadline = time.monotonic() + _FAREWELL
        for member in members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join(_FAREWELL)
            member.process.close()
            member.connection.close()
        self._store = None  # only now: processes may need it to leave their group

    def _collect(self, command: str) -> list[Any]:
        """Wait for every rank's answer to `command`."""
        answers: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        deadline = time.monotonic() + self._timeout
        while missing := set(range(len(self._members))) - answers.keys() - failures.keys():
            # A rank that has answered may still be needed by the others, so its death counts.
            handles: list[Any] = [self._members[rank].connection for rank in missing]
            handles += [
                m.process.sentinel for r, m in enumerate(self._members) if r not in failures
            ]
            if not wait(handles, max(0.0, deadline - time.monotonic())):
                break
            for rank, member in enumerate(self._members):
                reply = _read(member) if rank not in failures else None
                if reply is None:
                    continue
                if reply.failure is None:
                    answers[rank] = reply.value
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS)
                failures[rank] = reply.failure
        if failures:
            ordered = sorted(failures.values(), key=lambda failure: failure.is_of_another)
            texts = "\n".join(failure.text for failure in ordered)
            raise PeerError(f"{self.name}: '{command}' failed\n{texts}", ordered[0].reason)
        if missing:
            late = ", ".join(map(str, sorted(missing)))
            message = f"no answer to '{command}' from rank {late} in {self._timeout:g} s"
            raise PeerError(f"{self.name}: {message}", message)
        return [answers[rank] for rank in sorted(answers)]


class Reading(NamedTuple):
    """One rank's account of a step: its seconds, and its share of the batch's loss.

    The shares of all ranks add up to the loss.
    """

    seconds: float
    loss: float = 0.0


class Peer(PeerProcesses):
    """Processes that train one model, wait idly for their next step, and answer it by `Reading`s.

    Attributes:
        loss: the batch's loss in the last step; not a number before the first.
    """

    loss: float = float("nan")

    def step(self, *settings: Any) -> float:
        """Run one training step; its seconds, between barriers, on the slowest rank.

        Args:
            *settings: of this step alone, for peers whose ranks take some.

        Raises:
            PeerError: a process failed, died or took too long; the peer is closed.
        """
        readings: list[Reading] = self.call("step", *settings)
        self.loss = sum(reading.loss for reading in readings)
        return max(reading.seconds for reading in readings)


class TrainingRank(ABC):
    """One of several ranks that train a model together, and time their steps.

    Attributes:
        device: on which this one computes.
    """

    device = torch.device("cpu")

    @abstractmethod
    def _train(self) -> None:
        """Train on the batch once, with the optimizer's step."""

    @abstractmethod
    def _loss(self) -> float:
        """This rank's share of the loss of the last step."""

    def step(self, count: int = 1) -> Reading:
        """Some training steps, one after the other; the seconds are those of one."""

        def train() -> None:
            for _ in range(count):
                self._train()
            kind_of(self.device).synchronize(self.device)

        seconds = seconds_between_barriers(train) / count
        return Reading(seconds, self._loss())

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def seconds_between_barriers(body: Callable[[], None]) -> float:
    """How long every rank of the default process group needs to run its `body`."""
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start


def _read(member: _Member) -> _Reply | None:
    """The reply of a process, or a failure if it is dead; `None` if there is no reply yet."""
    dead = not member.process.is_alive()  # before the reply is read, or it could be missed
    try:
        if member.connection.poll():
            reply: _Reply = member.connection.recv()
            return reply
    except (EOFError, OSError):
        member.process.join(_LAST_WORDS)
        dead = True
    if not dead:
        return None
    status = member.process.exitcode
    how = f"killed by {signal.Signals(-status).name}" if (status or 0) < 0 else f"exit {status}"
    died = f"{member.process.name} died ({how})"
    return _Reply(None, _Failure(died, died))


def _serve(connection: Connection, place: Place, build: Build, threads: int) -> None:
    """Run one process: build the servant, run commands, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    try:
        keep_freed_memory()  # as Penstock's workers do, or the peers would pay for page faults
        torch.set_num_threads(threads)
        servant = build(place)
        connection.send(_Reply(None))
        # Blocks without using the processor. The end of the pipe means that the owner is gone.
        while (order := connection.recv()) is not None:
            command, arguments = order
            if command == _BECOME:
                servant.close()
                del servant
                gc.collect()
                build, life = arguments
                servant = build(replace(place, life=life))
                connection.send(_Reply(None))
            else:
                connection.send(_Reply(getattr(servant, command)(*arguments)))
        servant.close()
        os._exit(0)  # a regular exit of torch takes a second
    except (EOFError, BrokenPipeError):
        os._exit(1)
    except BaseException as error:
        text = f"rank {place.rank} of {place.size} raised:\n{traceback.format_exc()}"
        with suppress(OSError):
            connection.send(_Reply(None, _Failure(text, reason_of(error))))
        os._exit(1)  # a proper exit could wait for peers that will never answer


def _variables(threads: int) -> dict[str, str]:
    """Environment variables of every process.

    The thread counts also reach pools that `torch.set_num_threads` does not, the interface names
    keep traffic on loopback, ranks use the owner's store instead of starting one, and the messages
    of torch's C++ code about a peer that has left are silenced: the owner reports failures.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` in this process while others are started from it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
