"""Worker processes before they have a plan: they start at once, and import torch meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.devices.choice import Devices
from penstock.display.terminal import Progress
from penstock.errors import InputError
from penstock.plan import Plan
from penstock.workers.backend import DrivenBackend, Workers
from penstock.workers.placement import check_separate
from penstock.workers.pool import Job
from penstock.workers.probe import adding_here, overhead_here, ping, pong
from penstock.workers.processes.jobs import Enter, Modes
from penstock.workers.processes.pool import ProcessPool, Survivors
from penstock.workers.processes.worker_state import CPU, WorkerState
from penstock.workers.processes.workers import ProcessWorkers

_TIMEOUT = 120.0  # seconds; most of it for starting


class ProcessBackend(DrivenBackend):
    """Processes of this machine, on its CPU.

    Args:
        devices, least, threads: as of `DrivenBackend`.
        allocator_kept: whether the processes keep freed memory.
        survives: whether they can go on if one of them ends.
        spares: how many more processes wait to take the place of one that ends.
        survivors: processes that others have left; new ones are started as far as they do not
            suffice.

    Raises:
        DeviceError: a device does not exist.
        InputError: a device is no CPU.
    """

    def __init__(
        self,
        devices: Devices | None,
        least: int = 1,
        threads: int = 0,
        *,
        allocator_kept: bool,
        survives: bool = False,
        spares: int = 0,
        survivors: Survivors | None = None,
    ) -> None:
        super().__init__(devices, least, threads)
        self._allocator_kept = allocator_kept
        self._survives, self._spares = survives, spares
        self._memories = survivors.memories if survivors is not None else {}
        most = len(self.devices)  # if they are left to the plan, links are measured between two
        self._pool = self._pool_of(most if self._are_given else min(2, most), survivors)
        self.probe = ProcessProbe(self._pool)

    def _pool_of(self, count: int, survivors: Survivors | None = None) -> ProcessPool:
        return ProcessPool(count, lambda: None, survivors, self._survives, self._spares)

    def _have(self, devices: Sequence[torch.device], threads: int = 0) -> None:
        others = [str(device) for device in devices if device.type != "cpu"]
        if others:
            raise InputError(
                f'workers="processes" run on the CPU, not on {others[0]}; use workers="threads", '
                "which copies between GPUs on streams of their own"
            )
        super()._have(devices, threads)

    def wait(self, progress: Progress | None) -> None:
        """Until they have started, and imported what they need."""
        what = f"starting {len(self._pool)} worker processes"
        if progress:
            progress(0, 1, what)
        self._pool.run([_idle] * len(self._pool), _TIMEOUT)
        if progress:
            progress(1, 1, what)

    def check_replicas(self, replicas: int) -> None:
        """Any number of them: they share the model's memory."""

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Move the model to memory that they share, and send them their stages.

        If the plan has chosen how many workers there are, so many are started instead of those that
        links were measured with.
        """
        check_separate(model)
        if len(self._pool) != len(plan.devices):
            self._pool.close()
            self._pool = self._pool_of(len(plan.devices))
        self._enter()
        modes = Modes.here(self.threads, len(plan.devices), self._allocator_kept)
        seconds = self.timeout(plan, timeout)
        devices = self.in_order(plan)
        return ProcessWorkers(plan, model, self._pool, devices, seconds, modes, self._memories)

    def _enter(self) -> None:
        """Tell the processes that were in another pool of this one."""
        pool, count = self._pool, len(self._pool)
        if pool.old:
            jobs: list[Job] = [Enter(k, count, pool.grant(pool.board.fd, k)) for k in pool.old]
            pool.run([*jobs, *[_idle] * (count - len(jobs))], _TIMEOUT)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


@dataclass(frozen=True)
class ProcessProbe:
    """Worker processes that have no plan yet; links are measured between the first two."""

    pool: ProcessPool
    overlaps = False  # the sender copies

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """Always: values are copied into shared memory."""
        return True

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """The seconds there and back through shared memory, by round."""
        found: list[float] = self._joined(size, rounds)[0]
        return found

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """The larger overhead of two processes that are linked."""
        return float(max(self._joined()))

    def adding(self, one: torch.device, other: torch.device) -> float:
        """The larger cost of adding in order, of two processes at the same time."""
        return float(max(self._first_two([_add, _add])))

    def _joined(self, size: int = 0, rounds: int = 0) -> list[Any]:
        """What the first two workers measure at the ends of a link between them."""
        here, there = socket.socketpair()
        with here, there:
            grants = self.pool.grant(here.fileno(), 0), self.pool.grant(there.fileno(), 1)
        return self._first_two([_AtEnd(k, g, size, rounds) for k, g in enumerate(grants)])

    def _first_two(self, jobs: Sequence[Job]) -> list[Any]:
        """The results of a job for each of the first two workers."""
        idle: list[Job] = [_idle] * (len(self.pool) - len(jobs))
        return self.pool.run([*jobs, *idle], _TIMEOUT)[: len(jobs)]


@dataclass(frozen=True)
class _AtEnd:
    """Measure at one end of a link: the time there and back, or the overhead if `rounds` is 0."""

    index: int
    grant: int
    size: int
    rounds: int

    def __call__(self, own: WorkerState) -> list[float] | float | None:
        if not self.rounds:
            link = own.sink(self.grant) if self.index == 0 else own.source(self.grant)
            return overhead_here(self.index, link, CPU)
        if self.index == 0:
            return ping(own.sink(self.grant), CPU, self.size, self.rounds)
        pong(own.source(self.grant), CPU, self.rounds)
        return None


def _add(own: WorkerState) -> float:
    """Measure what it costs to add in order."""
    try:
        return adding_here(CPU, own.lend)
    finally:
        own.empty()


def _idle(own: WorkerState) -> None:
    """A job that does nothing: when it is done, the process has started."""
