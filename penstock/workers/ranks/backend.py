"""The ranks of a launch by torchrun before they have a plan: each is there, and runs the script."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from penstock.capture import Program
from penstock.devices.choice import Devices
from penstock.devices.kinds import kind_of
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.workers.backend import Backend, Workers, order_of, timeout_of
from penstock.workers.placement import check_separate
from penstock.workers.ranks.rendezvous import rendezvous
from penstock.workers.ranks.workers import RankWorkers
from penstock.workers.thread_probe import ThreadProbe

_TIMEOUT = 600.0  # seconds that a pass may take at least: ranks may do something else in between


class RankBackend(Backend):
    """The ranks of a launch, as seen by one of them. Rank 0 plans, and measures with threads.

    Args:
        devices: of all ranks; `None`, or their number, leaves each rank its own.
        threads: intra-op threads of each that is on a CPU; 0 for its share of the cores.

    Raises:
        InputError: there are none, or not as many as devices.
        DeviceError: this rank's device does not exist.
        WorkerError: they did not find each other.
    """

    why_one_replica = (
        "There is one replica, as all replicas need the whole batch on ranks of their own; "
        "replicas= asks for several."
    )

    in_one_memory = False

    def __init__(self, devices: Devices | None, threads: int = 0) -> None:
        self._launch = rendezvous(devices)
        entries = self._launch.entries
        self._names = [entry.device for entry in entries]
        shares = []  # of the cores of a machine that ranks on its CPU have
        for entry in entries:
            beside = [e for e in entries if e.machine == entry.machine]
            shares.append(entry.cores // max(1, sum(e.device == "cpu" for e in beside)))
        self.given_threads = threads
        self.threads = threads or max(1, min(shares))
        self.leads = self._launch.ranks.rank == 0
        self.probe = ThreadProbe()

    def operation(self, what: str) -> AbstractContextManager[None]:
        """Something that all ranks do; if it fails on one, it fails on all."""
        return self._launch.ranks.operation(what)

    def broadcast_plan(self, program: Program, plan: Plan | None) -> Plan:
        """The plan of rank 0, once all ranks have shown that they have the same program."""
        found = self._launch.ranks.end((program.fingerprint, len(program), plan))
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

    def check_replicas(self, replicas: int) -> None:
        """Any number of them: each rank has a model of its own."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """For the device of every rank, one of this machine that is like it."""
        found = []
        for name in self._names:
            device = torch.device(name)
            here = kind_of(device).devices()
            if not here:
                raise PlanError(
                    f"rank 0 plans for {', '.join(self._names)} and has no {device.type} device to "
                    "measure; give it a plan that was made elsewhere: plan="
                )
            found.append(device if device.index is None else here[device.index % len(here)])
        return found

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Connect to the neighbours, and build this rank's stages."""
        check_separate(model)
        seconds = timeout_of(plan, timeout, _TIMEOUT)
        order = order_of(self._names, plan)
        return RankWorkers(self._launch, plan, model, order, self.threads, seconds)

    def close(self) -> None:
        """Listen no more; ranks go when their scripts end."""
        self._launch.others.listener.close()
