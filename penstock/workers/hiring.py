"""The kinds of workers: how their links are measured, and how they are given a plan to run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn

from penstock.devices.choice import threads_per_worker
from penstock.errors import InputError
from penstock.links.shared_memory import Sink, Source
from penstock.links.wire import Wire
from penstock.plan import Plan
from penstock.profile.measure import Progress
from penstock.workers.crew import Crew, ThreadWorkers
from penstock.workers.placement import check_separate
from penstock.workers.pool import Job
from penstock.workers.probe import Range, ThreadRange, overhead_here, ping, pong
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.processes.site import CPU, Site
from penstock.workers.processes.workers import ProcessWorkers

Workers = Literal["auto", "threads", "processes", "torchrun"]
"""Who runs the stages: threads of this process, processes of this machine, or torchrun's ranks."""

KINDS = ("auto", "threads", "processes", "torchrun")

_TIMEOUT = 120.0  # seconds; most of it for starting


class Hired(Protocol):
    """Workers that have no plan yet."""

    @property
    def range(self) -> Range:
        """Where their links are measured."""

    def wait(self, progress: Progress | None) -> None:
        """Until they have started."""

    def crew(
        self, plan: Plan, model: nn.Module, devices: Sequence[torch.device], timeout: float
    ) -> Crew:
        """Give them a plan, for these devices; the crew dismisses them when it is closed."""

    def dismiss(self) -> None:
        """Let them go, if they never got one."""


def hire(kind: str, devices: Sequence[torch.device], threads: int, allocator_kept: bool) -> Hired:
    """Workers of this process or of this machine, one for each device.

    Args:
        kind: see `Workers`.
        devices: of the workers.
        threads: intra-op threads of each CPU worker.
        allocator_kept: whether they keep freed memory.

    Raises:
        InputError: the kind cannot use these devices.
    """
    if kind != "processes":
        return _Threads(threads)
    others = [str(device) for device in devices if device.type != "cpu"]
    if others:
        raise InputError(
            f'workers="processes" run on the CPU, not on {others[0]}; use workers="threads", '
            "which copies between GPUs on streams of their own"
        )
    return _Processes(ProcessPool(len(devices), lambda: None), threads, allocator_kept)


@contextmanager
def measuring(kind: str, devices: Sequence[torch.device]) -> Iterator[Range]:
    """Where the links of such workers are measured; they are gone afterwards.

    Raises:
        InputError: there is no such kind, or it cannot use these devices.
    """
    hired = hire(kind, devices, threads_per_worker(devices), allocator_kept=False)
    try:
        hired.wait(None)
        yield hired.range
    finally:
        hired.dismiss()


@dataclass
class _Threads:
    """Threads, which are started when there is a plan."""

    threads: int
    range: Range = ThreadRange()  # noqa: RUF009 - it has no state

    def wait(self, progress: Progress | None) -> None: ...

    def crew(
        self, plan: Plan, model: nn.Module, devices: Sequence[torch.device], timeout: float
    ) -> Crew:
        return ThreadWorkers(plan, devices, self.threads, timeout)

    def dismiss(self) -> None: ...


@dataclass
class _Processes:
    """Processes, which start at once, and import torch while the plan is made."""

    workers: ProcessPool
    threads: int
    allocator_kept: bool

    @property
    def range(self) -> Range:
        return ProcessRange(self.workers)

    def wait(self, progress: Progress | None) -> None:
        what = f"starting {len(self.workers)} worker processes"
        if progress:
            progress(0, 1, what)
        self.workers.run([_idle] * len(self.workers), _TIMEOUT)
        if progress:
            progress(1, 1, what)

    def crew(
        self, plan: Plan, model: nn.Module, devices: Sequence[torch.device], timeout: float
    ) -> Crew:
        check_separate(model)
        return ProcessWorkers(plan, model, self.workers, self.threads, timeout, self.allocator_kept)

    def dismiss(self) -> None:
        self.workers.close()


@dataclass(frozen=True)
class ProcessRange:
    """Worker processes that have no plan yet; their first two are measured."""

    workers: ProcessPool
    overlaps = False  # the sender copies

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """Always, into shared memory."""
        return True

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """Through shared memory."""
        found: list[float] = self._joined(
            partial(ping, device=CPU, size=size, rounds=rounds),
            partial(pong, device=CPU, rounds=rounds),
        )[0]
        return found

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """In two processes."""
        return float(max(self._joined(_first_overhead, _second_overhead)))

    def _joined(self, first: Callable[[Sink], Any], second: Callable[[Source], Any]) -> list[Any]:
        """What the first two workers make of the ends of a link between them."""
        here, there = socket.socketpair()
        with here, there:
            grants = self.workers.grant(0, here.fileno()), self.workers.grant(1, there.fileno())
        jobs: list[Job] = [_AtSink(grants[0], first), _AtSource(grants[1], second)]
        idle = [_idle] * (len(self.workers) - len(jobs))
        return self.workers.run(jobs + idle, _TIMEOUT)[: len(jobs)]


@dataclass(frozen=True)
class _AtSink:
    """Does something with the sending end of a link."""

    grant: int
    work: Callable[[Sink], Any]

    def __call__(self, site: Site) -> Any:
        sender, receiver = site.ends(Wire(socket.socket(fileno=site.granted(self.grant))))
        return self.work(Sink(sender, receiver))


@dataclass(frozen=True)
class _AtSource:
    """Does something with the receiving end of a link."""

    grant: int
    work: Callable[[Source], Any]

    def __call__(self, site: Site) -> Any:
        sender, receiver = site.ends(Wire(socket.socket(fileno=site.granted(self.grant))))
        return self.work(Source(receiver, sender))


def _first_overhead(link: Sink) -> float:
    return overhead_here(0, link, CPU)


def _second_overhead(link: Source) -> float:
    return overhead_here(1, link, CPU)


def _idle(site: Site) -> None:
    """Nothing to do."""
