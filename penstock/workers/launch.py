"""Which workers there are, before there is a plan for them: those of this process, or all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from penstock.capture import Program
from penstock.devices.choice import Devices, existing_devices, threads_per_worker
from penstock.errors import InputError, PlanError
from penstock.plan import Plan
from penstock.profile.measure import Progress
from penstock.workers.crew import Crew
from penstock.workers.hiring import KINDS, hire
from penstock.workers.placement import check_separate
from penstock.workers.probe import Range, ThreadRange
from penstock.workers.ranks.rendezvous import check_is_alone, is_torchrun, join
from penstock.workers.ranks.workers import RankWorkers

_TIMEOUT = 60.0  # seconds that a step may take at least, unless the user says otherwise
_TORCHRUN_TIMEOUT = 600.0  # the same, where ranks may be busy with something else in between
_TIMEOUTS = 50  # of predicted steps

T = TypeVar("T")


class MakePlan(Protocol):
    """Makes a plan, or reads it."""

    def __call__(self, *, devices: Sequence[torch.device]) -> Plan:
        """For these devices of this machine."""


class Launch(Protocol):
    """The workers that there will be.

    Attributes:
        threads: intra-op threads of each CPU worker.
    """

    threads: int

    def done(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns here; if it fails on one rank, all fail."""

    def decided(self, program: Program, make: MakePlan) -> Plan:
        """The plan of all workers.

        Raises:
            PlanError: it does not fit the program or the devices, or there is none that would.
        """

    def in_order(self, plan: Plan) -> list[torch.device]:
        """The device of every worker; of those that are elsewhere, one that is here."""

    def homes(self, plan: Plan) -> list[torch.device | None]:
        """The device of every stage; `None` if that is elsewhere."""

    @property
    def range(self) -> Range:
        """Where links are measured."""

    def wait(self, progress: Progress | None) -> None:
        """Until the workers have started."""

    def crew(self, plan: Plan, model: nn.Module, timeout: float | None) -> Crew:
        """The workers themselves."""

    def dismiss(self) -> None:
        """Let them go, if they never got a plan."""


def launched(workers: str, devices: Devices | None, allocator_kept: bool) -> Launch:
    """The workers of this kind.

    Args:
        workers: see `penstock.workers.hiring.Workers`.
        devices: of the workers.
        allocator_kept: whether worker processes keep freed memory.

    Raises:
        InputError: there is no such kind, or the devices do not fit; or the kind is `"auto"`, and
            this process is one of several that torchrun has not started.
        DeviceError: a device does not exist.
        WorkerError: not all ranks are there.
    """
    if workers not in KINDS:
        raise InputError(f"workers={workers!r} is unknown; choose one of {', '.join(KINDS)}")
    if workers == "torchrun" or (workers == "auto" and is_torchrun()):
        return Together(devices)
    if workers == "auto":
        check_is_alone()
    return Alone(workers, devices, allocator_kept)


class Alone:
    """Workers that this process has or drives."""

    def __init__(self, workers: str, devices: Devices | None, allocator_kept: bool) -> None:
        self._devices = existing_devices(devices)
        self.threads = threads_per_worker(self._devices)
        self._hired = hire(workers, self._devices, self.threads, allocator_kept)

    @property
    def range(self) -> Range:
        """Where links are measured."""
        return self._hired.range

    def wait(self, progress: Progress | None) -> None:
        """Until the workers have started."""
        self._hired.wait(progress)

    def dismiss(self) -> None:
        """Let them go."""
        self._hired.dismiss()

    def done(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns."""
        return work()

    def decided(self, program: Program, make: MakePlan) -> Plan:
        """The plan of all workers."""
        plan = make(devices=self._devices)
        plan.check_fits(program.fingerprint, list(map(str, self._devices)), len(program))
        return plan

    def in_order(self, plan: Plan) -> list[torch.device]:
        """The device of every worker."""
        names = list(map(str, self._devices))
        return [self._devices[k] for k in _order(names, plan)]

    def homes(self, plan: Plan) -> list[torch.device | None]:
        """The device of every stage."""
        devices = self.in_order(plan)
        return [devices[worker] for worker in plan.placement]

    def crew(self, plan: Plan, model: nn.Module, timeout: float | None) -> Crew:
        """The workers themselves."""
        timeout = timeout or max(_TIMEOUT, _TIMEOUTS * plan.predicted_step_seconds)
        return self._hired.crew(plan, model, self.in_order(plan), timeout)


class Together:
    """The ranks of a launch by torchrun."""

    def __init__(self, devices: Devices | None) -> None:
        self._launch = join(devices)
        entries = self._launch.entries
        self._names = [entry.device for entry in entries]
        shares = []  # of the cores of a machine that ranks on its CPU have
        for entry in entries:
            beside = [e for e in entries if e.machine == entry.machine]
            shares.append(entry.cores // max(1, sum(e.device == "cpu" for e in beside)))
        self.threads = max(1, min(shares))

    def done(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns here; if it fails on one rank, all fail."""
        ranks = self._launch.ranks
        with ranks.together(what):
            result = work()
            ranks.settle(None)
        return result

    def decided(self, program: Program, make: MakePlan) -> Plan:
        """The plan of rank 0."""
        ranks = self._launch.ranks
        with ranks.together("the planning"):
            plan = make(devices=self._stand_ins()) if ranks.rank == 0 else None
            found = ranks.settle((program.fingerprint, len(program), plan))
        for rank, (fingerprint, calls, _) in enumerate(found):
            if (fingerprint, calls) != found[0][:2]:
                raise PlanError(
                    f"rank {rank} has another model than rank 0: its program is {fingerprint} with "
                    f"{calls} calls, that of rank 0 is {found[0][0]} with {found[0][1]}. All ranks "
                    "must build the same model and give the same example"
                )
        whole: Plan = found[0][2]
        whole.check_fits(program.fingerprint, self._names, len(program))
        return whole

    def _stand_ins(self) -> list[torch.device]:
        """For the device of every rank, one of this machine that is like it."""
        here, found = torch.cuda.device_count(), []
        for name in self._names:
            device = torch.device(name)
            if device.type == "cuda" and not here:
                raise PlanError(
                    f"rank 0 plans for {', '.join(self._names)} and has no CUDA device to measure; "
                    "give it a plan that was made elsewhere: plan="
                )
            index = device.index if device.type == "cuda" else None
            found.append(device if index is None else torch.device("cuda", index % here))
        return found

    def in_order(self, plan: Plan) -> list[torch.device]:
        """This rank's device, for every worker."""
        return [self._launch.device] * len(self._names)

    def homes(self, plan: Plan) -> list[torch.device | None]:
        """This rank's device for its own stages."""
        me = _order(self._names, plan).index(self._launch.ranks.rank)
        return [self._launch.device if worker == me else None for worker in plan.placement]

    @property
    def range(self) -> Range:
        """Rank 0 measures with threads of its own."""
        return ThreadRange()

    def wait(self, progress: Progress | None) -> None:
        """They are all there."""

    def dismiss(self) -> None:
        """Listen no more; ranks go when their scripts end."""
        self._launch.others.meeting.close()

    def crew(self, plan: Plan, model: nn.Module, timeout: float | None) -> Crew:
        """This rank's part of the workers."""
        check_separate(model)
        timeout = timeout or max(_TORCHRUN_TIMEOUT, _TIMEOUTS * plan.predicted_step_seconds)
        order = _order(self._names, plan)
        return RankWorkers(self._launch, plan, model, order, self.threads, timeout)


def _order(names: Sequence[str], plan: Plan) -> list[int]:
    """For every worker which of these devices it has: the plan may have put them into an order."""
    if Counter(names) != Counter(plan.devices):
        return list(range(len(names)))
    left = list(range(len(names)))
    order = []
    for device in plan.devices:
        order.append(next(k for k in left if names[k] == device))
        left.remove(order[-1])
    return order
