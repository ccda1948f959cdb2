"""Worker processes before they have a plan: they start at once, and import torch meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.devices.choice import Devices
from penstock.devices.kinds import kind_of
from penstock.devices.streams import with_streams
from penstock.display.terminal import Progress
from penstock.errors import InputError
from penstock.links.device_memory import can_cross
from penstock.links.shared_memory import LinkSink
from penstock.plan import Plan
from penstock.workers.backend import DrivenBackend, Survivors, Workers, timeout_of
from penstock.workers.common_jobs import Modes
from penstock.workers.placement import check_separate
from penstock.workers.pool import Job
from penstock.workers.probe import adding_here, overhead_here, ping, pong
from penstock.workers.processes.jobs import End, Enter, linked
from penstock.workers.processes.pool import ProcessPool, ProcessSurvivors
from penstock.workers.processes.worker_state import WorkerState
from penstock.workers.processes.workers import ProcessWorkers

_TIMEOUT = 120.0  # seconds; most of it for starting
_LEAVE_DEVICES = 10.0  # to free memory of a device, which stays allocated if the process is killed


class ProcessBackend(DrivenBackend):
    """Processes of this machine, on its CPU or its GPUs.

    Args:
        devices, least, threads: as of `DrivenBackend`.
        allocator_kept: whether the processes keep freed memory.
        survives: whether the others go on if one of the processes ends.
        spares: how many more processes wait to take the place of one that ends.
        survivors: processes that are left of another pool; new ones are started only if these do
            not suffice.
        staying: how many processes will join later, by `welcome`. That many fewer are started, and
            links cannot be measured.

    Raises:
        DeviceError: a device does not exist.
        InputError: a device has memory that processes cannot share; or workers on devices other
            than CPUs are to go on after one has ended.
    """

    copies_gradients = True  # from its own memory to the slot that it has in common with the driver

    def __init__(
        self,
        devices: Devices | None,
        least: int = 1,
        threads: int = 0,
        *,
        allocator_kept: bool,
        survives: bool = False,
        spares: int = 0,
        survivors: ProcessSurvivors | None = None,
        staying: int = 0,
    ) -> None:
        super().__init__(devices, least, threads)
        others = [str(device) for device in self.devices if device.type != "cpu"]
        if others and survives:
            raise InputError(
                "on_failure= is for worker processes on CPUs, whose optimizer state outlives them, "
                f"and not for {others[0]}. Use pipe.autosave(folder, every=...) and "
                "penstock.resume: a script that is started again goes on there"
            )
        self._allocator_kept = allocator_kept
        self._survives, self._spares = survives, spares
        self._memories = survivors.memories if survivors is not None else {}
        self._staying = ProcessSurvivors()
        most = len(self.devices)  # if they are left to the plan, links are measured between two
        count = most if self._are_given else min(2, most)
        if staying:
            self._pool = self._pool_of(max(0, count - staying), None, spares=0)
        else:
            self._pool = self._pool_of(count, survivors, spares)
        self.starting = len(self._pool) + self._pool.spares
        self.probe = ProcessProbe(self._pool)

    def _pool_of(self, count: int, survivors: ProcessSurvivors | None, spares: int) -> ProcessPool:
        is_on_cpus = all(device.type == "cpu" for device in self.devices)
        leave = {} if is_on_cpus else {"leave": _LEAVE_DEVICES}
        return ProcessPool(count, lambda: None, survivors, self._survives, spares, **leave)

    def welcome(self, survivors: Survivors) -> None:
        """Have these processes as the first workers; those that were started here come after."""
        if isinstance(survivors, ProcessSurvivors):
            self._staying, self._memories = survivors, survivors.memories
        else:
            survivors.close()

    def _have(self, devices: Sequence[torch.device], threads: int = 0) -> None:
        others = [d for d in devices if d.type != "cpu" and not kind_of(d).can_share]
        if others:
            raise InputError(
                f'workers="processes" run on CPUs and CUDA devices, not on {others[0]}, whose '
                'memory processes cannot share; use workers="threads"'
            )
        super()._have(devices, threads)

    def wait(self, progress: Progress | None) -> None:
        """Wait until the processes have started, and imported what they need."""
        if not len(self._pool):
            return
        what = f"starting {len(self._pool)} worker processes"
        if progress:
            progress(0, 1, what)
        self._pool.run([_idle] * len(self._pool), _TIMEOUT)
        if progress:
            progress(1, 1, what)

    def check_replicas(self, replicas: int) -> None:
        """Raise if there are several replicas on devices other than CPUs.

        On CPUs any number of replicas share the model's memory.

        Raises:
            InputError: there are.
        """
        others = [str(device) for device in self.devices if device.type != "cpu"]
        if others and replicas > 1:
            raise InputError(
                f'replicas={replicas} on {others[0]} are for workers="threads"; worker processes '
                "have one replica there: use replicas=1"
            )

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Move the model to memory that the processes share, and send them their stages.

        If the plan has chosen the number of workers, the processes with which links were measured
        are among them, as far as they are needed.
        """
        check_separate(model)
        pool, count = self._pool, len(plan.devices)
        if self._staying or (len(pool), pool.spares) != (count, self._spares):
            every = self._staying.joined_by(pool.survivors())
            self._pool = self._pool_of(count, every, self._spares)
            self._staying = ProcessSurvivors()
        self._enter()
        devices = self.in_order(plan)
        kinds = [kind_of(device) for device in with_streams(devices)]
        count, kept = len(plan.devices), self._allocator_kept
        modes = Modes.here(self.threads, count, kept, kinds[0] if kinds else None)
        seconds = timeout_of(plan, timeout)
        return ProcessWorkers(plan, model, self._pool, devices, seconds, modes, self._memories)

    def _enter(self) -> None:
        """Have the processes that come from another pool enter this one."""
        pool, count = self._pool, len(self._pool)
        if pool.old:
            jobs: list[Job] = [Enter(k, count, pool.grant(pool.board.fd, k)) for k in pool.old]
            pool.run([*jobs, *[_idle] * (count - len(jobs))], _TIMEOUT)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
        self._staying.close()


@dataclass(frozen=True)
class ProcessProbe:
    """Worker processes that have no plan yet; links are measured between the first two."""

    pool: ProcessPool
    kind = "process"

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """Always: values are copied into shared memory, of the CPU or of a device."""
        return True

    def overlaps(self, one: torch.device, other: torch.device) -> bool:
        """Where the sender's device copies; else it does so itself, into the CPU's memory."""
        return can_cross(one, other)

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """The seconds there and back, by round."""
        found: list[float] = self._joined(one, other, size, rounds)[0]
        return found

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """The larger overhead of two processes that are linked."""
        return float(max(self._joined(one, other)))

    def adding(self, one: torch.device, other: torch.device) -> float:
        """The larger cost of adding in order, of two processes at the same time."""
        return float(max(self._first_two([_Adding(one), _Adding(other)])))

    def _joined(
        self, one: torch.device, other: torch.device, size: int = 0, rounds: int = 0
    ) -> list[Any]:
        """What the first two workers measure at the ends of a link between them."""
        ends = linked(self.pool.grant, 0, 1, (one, other))
        jobs = [_AtEnd(*at, size, rounds) for at in zip(ends, (one, other), strict=True)]
        return self._first_two(jobs)

    def _first_two(self, jobs: Sequence[Job]) -> list[Any]:
        """The results of a job for each of the first two workers."""
        idle: list[Job] = [_idle] * (len(self.pool) - len(jobs))
        return self.pool.run([*jobs, *idle], _TIMEOUT)[: len(jobs)]


@dataclass(frozen=True)
class _AtEnd:
    """Measure at one end of a link: the time there and back, or the overhead if `rounds` is 0."""

    end: End
    device: torch.device
    size: int
    rounds: int

    def __call__(self, own: WorkerState) -> list[float] | float | None:
        own.work_on(self.device)
        kind, grant, peer = self.end
        link = own.sink(grant, peer) if kind == "sink" else own.source(grant, peer)
        own.links = {0: link}  # the other end may still use its memory when this one is done
        if not self.rounds:
            return overhead_here(0 if kind == "sink" else 1, link, self.device)
        if isinstance(link, LinkSink):
            return ping(link, self.device, self.size, self.rounds)
        pong(link, self.device, self.rounds)
        return None


@dataclass(frozen=True)
class _Adding:
    """Measure what it costs to add in order on this device."""

    device: torch.device

    def __call__(self, own: WorkerState) -> float:
        own.work_on(self.device)
        try:
            return adding_here(self.device, own.lend)
        finally:
            own.empty()


def _idle(own: WorkerState) -> None:
    """A job that does nothing: when it is done, the process has started."""
