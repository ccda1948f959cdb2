"""Which kind of workers: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.devices.allocator import Allocator, keep_freed_memory
from penstock.devices.choice import Devices
from penstock.errors import InputError
from penstock.workers.backend import Backend, DrivenBackend, Survivors, WorkerKind
from penstock.workers.processes.backend import ProcessBackend
from penstock.workers.processes.pool import ProcessSurvivors
from penstock.workers.ranks.backend import RankBackend
from penstock.workers.ranks.rendezvous import check_is_alone, is_ray_train, is_torchrun
from penstock.workers.ray.backend import RayBackend
from penstock.workers.ray.options import Ray
from penstock.workers.ray.pool import ActorSurvivors
from penstock.workers.threads.backend import ThreadBackend

OnFailure = Literal["raise", "replace", "continue"]
"""What happens if a worker process ends: an error; or another one takes its place; or the others
go on without it."""

KINDS: tuple[str, ...] = get_args(WorkerKind)
ON_FAILURE: tuple[str, ...] = get_args(OnFailure)


@dataclass(frozen=True)
class WorkerOptions:
    """The user's choice of workers, see `penstock.Pipeline`.

    Attributes:
        workers: their kind, or `Ray`, which also says what is wanted of the cluster.
        devices: of the workers; `None` leaves them to the plan.
        timeout: seconds that a pass may take; `None` derives it from the plan.
        allocator: `"keep"` if freed memory stays with the process, `"system"` if the C library
            decides.
        least: the smallest number of workers, if `devices` is `None`.
        threads: intra-op threads of each CPU worker; 0 for its share of the cores.
        on_failure: what happens if a worker process or an actor ends.

    Raises:
        InputError: an option has a value that is not allowed.
    """

    workers: WorkerKind | Ray
    devices: Devices | None
    timeout: float | None
    allocator: Allocator
    least: int = 1
    threads: int = 0
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.workers, Ray) and self.workers not in KINDS:
            raise InputError(
                f"workers={self.workers!r} is unknown; choose one of {', '.join(KINDS)}, or "
                "penstock.Ray(...)"
            )
        timeout: Any = self.timeout
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout > 0):
            raise InputError(f"timeout={timeout!r} must be a positive number of seconds, or None")
        if type(self.threads) is not int or self.threads < 0:
            raise InputError(
                f"threads_per_worker={self.threads!r} must be a number of intra-op threads, 1 or "
                "more, or None"
            )
        if self.allocator not in ("keep", "system"):
            raise InputError(f'allocator={self.allocator!r} is unknown; choose "keep" or "system"')
        if self.on_failure not in ON_FAILURE:
            raise InputError(
                f"on_failure={self.on_failure!r} is unknown; choose one of {', '.join(ON_FAILURE)}"
            )

    def keep_freed_memory(self) -> bool:
        """Have this process keep freed memory, if that is wanted; returns whether it does."""
        return self.allocator == "keep" and keep_freed_memory()

    @property
    def are_ranks(self) -> bool:
        """Whether every process that runs the script is a worker."""
        is_started = is_torchrun() or is_ray_train()
        return self.workers == "torchrun" or (self.workers == "auto" and is_started)

    @property
    def survives(self) -> bool:
        """Whether others go on if a worker ends."""
        return self.on_failure != "raise"

    def backend(
        self, allocator_kept: bool, survivors: Survivors | None = None, staying: int = 0
    ) -> Backend:
        """Workers of this kind, without a plan.

        Args:
            allocator_kept: whether worker processes keep freed memory.
            survivors: processes or actors that are to be among them.
            staying: how many processes will be among them later, by `Backend.welcome`.

        Raises:
            InputError: the devices do not fit; or the kind is `"auto"`, and this process is one of
                several that torchrun has not started.
            DeviceError: a device does not exist.
            WorkerError: not all ranks are there.
        """
        if self.are_ranks:
            self._check_raises("ranks of torchrun, whose agent starts all of them again")
            return RankBackend(self.devices, self.threads)
        if self.workers == "auto":
            check_is_alone()
        if self.workers == "ray" or isinstance(self.workers, Ray):
            return RayBackend(
                *(self.devices, self.least, self.threads),
                options=self.workers if isinstance(self.workers, Ray) else Ray(),
                allocator_kept=allocator_kept,
                survives=self.survives,
                survivors=survivors if isinstance(survivors, ActorSurvivors) else None,
            )
        if self.workers == "processes":
            return ProcessBackend(
                *(self.devices, self.least, self.threads),
                allocator_kept=allocator_kept,
                survives=self.survives,
                spares=int(self.on_failure == "replace"),
                survivors=survivors if isinstance(survivors, ProcessSurvivors) else None,
                staying=staying,
            )
        self._check_raises("threads, which end with this process")
        return ThreadBackend(self.devices, self.least, self.threads)

    def _check_raises(self, others: str) -> None:
        """Raise if workers of this kind are to go on after one has ended.

        Raises:
            InputError: they are.
        """
        if self.survives:
            raise InputError(
                f'on_failure="{self.on_failure}" is for workers="processes" and workers="ray", '
                f"not for {others}. "
                "pipe.autosave(folder, every=...) and penstock.resume let a script go on that was "
                "started again"
            )


@contextmanager
def measuring(kind: str, devices: Devices | None, least: int = 1) -> Iterator[DrivenBackend]:
    """Start workers to measure links with for a plan, and dismiss them afterwards.

    Args:
        kind: `"threads"` or `"processes"`; others are measured with threads.
        devices: of the workers; `None` leaves them to the plan.
        least: the smallest number of workers, if `devices` is `None`.

    Raises:
        DeviceError: a device does not exist.
        InputError: the workers cannot use these devices.
    """
    workers: DrivenBackend
    if kind == "processes":
        workers = ProcessBackend(devices, least, allocator_kept=False)
    else:
        workers = ThreadBackend(devices, least)
    try:
        workers.wait(None)
        yield workers
    finally:
        workers.close()
