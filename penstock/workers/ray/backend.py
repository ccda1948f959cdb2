"""Workers in a Ray cluster before they have a plan: there is the cluster, and no actor yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.cadence import wait_until
from penstock.devices.choice import Devices
from penstock.errors import InputError
from penstock.plan import Plan
from penstock.workers.backend import DrivenBackend, Workers, timeout_of
from penstock.workers.common_jobs import Modes
from penstock.workers.placement import check_separate
from penstock.workers.ray.cluster import Cluster
from penstock.workers.ray.options import Ray
from penstock.workers.ray.pool import ActorPool, ActorSurvivors
from penstock.workers.ray.workers import RayWorkers
from penstock.workers.thread_probe import ThreadProbe

_PAUSE = 0.5  # seconds between two looks


class RayBackend(DrivenBackend):
    """Workers in a Ray cluster. The script plans, and measures with threads.

    Actors are started when there is a plan: those of another one may still have what the cluster
    has room for.

    Args:
        devices, least, threads: as of `DrivenBackend`; every device is the CPU of some node.
        options: what is wanted of the cluster.
        allocator_kept: whether the actors' processes keep freed memory.
        survives: whether they can go on if one of them dies.
        survivors: actors that others have left; new ones are started as far as they do not suffice.

    Raises:
        DeviceError: a device does not exist.
        InputError: a device is no CPU, or the cluster has no room for the workers.
        PenstockError: Ray is not installed.
    """

    in_one_memory = False

    def __init__(
        self,
        devices: Devices | None,
        least: int = 1,
        threads: int = 0,
        *,
        options: Ray,
        allocator_kept: bool,
        survives: bool = False,
        survivors: ActorSurvivors | None = None,
    ) -> None:
        self._options = options
        self._allocator_kept = allocator_kept
        self._survives = survives
        self._survivors = survivors
        if survivors is not None and not survivors:
            survivors.close()
            self._survivors = None
        if self._survivors is not None:
            self._cluster = self._survivors.cluster
        else:
            self._cluster = Cluster(options, _number_of(devices) or options.max or least)
        try:
            if devices is None and options.max is not None:
                devices = ["cpu"] * self._room(options.min, options.max)
            if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
                devices = ["cpu"] * devices
            super().__init__(devices, least, threads)
            if not self._are_given:
                self._choose(least)
            self.probe = ThreadProbe()
        except BaseException:
            self._cluster.leave()
            raise

    def _choose(self, least: int) -> None:
        """The numbers of workers of which the plan has one: 1, 2, 4, ... that have a CPU each."""
        cpus = int(sum(node.total.get("CPU", 0) for node in self._cluster.nodes()))
        numbers = [max(least, self._options.min)]
        while 2 * numbers[-1] <= cpus:
            numbers.append(2 * numbers[-1])
        self._choices = [[torch.device("cpu")] * number for number in numbers]
        self._have(self._choices[-1])

    def _room(self, least: int, most: int) -> int:
        """How many workers the cluster has room for, `most` at most; waits for room for `least`.

        Raises:
            InputError: there was no room for so many in time.
        """
        cpus = self._options.cpus or 1

        def enough() -> int:
            room = self._cluster.room(cpus)
            return room if room >= least else 0

        if room := wait_until(enough, self._options.wait, _PAUSE):
            return min(room, most)
        raise InputError(
            f"the cluster has room for {self._cluster.room(cpus)} workers with {cpus} CPUs each, "
            f"and at least {least} are needed; it was waited for more for "
            f"{self._options.wait:g} s. Add nodes, or give ps.Ray other min=, cpus= or wait="
        )

    def _have(self, devices: Sequence[torch.device], threads: int = 0) -> None:
        others = [str(device) for device in devices if device.type != "cpu"]
        if others:
            raise InputError(
                f'workers="ray" run on CPUs so far, not on {others[0]}. For GPUs of several '
                "machines start the script with torchrun, or within Ray Train"
            )
        self._devices = devices
        self.threads = threads or self._cluster.cpus_for(len(devices))

    def check_replicas(self, replicas: int) -> None:
        """Any number of them: each has weights of its own."""

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Start as many actors as the plan has workers, and send them their stages."""
        check_separate(model)
        count = len(plan.devices)
        survivors = self._survivors
        cpus = survivors.cpus if survivors else self._cluster.share_of(self.threads, count)
        pool = ActorPool(self._cluster, count, cpus, self._survives, survivors)
        modes = Modes.here(self.threads, count, self._allocator_kept)
        seconds = timeout_of(plan, timeout)
        return RayWorkers(plan, model, pool, self.in_order(plan), seconds, modes)

    def close(self) -> None:
        """Leave the cluster, if no actors have been started in it."""
        self._cluster.leave()


def _number_of(devices: Devices | None) -> int:
    return devices if isinstance(devices, int) else len(devices or ())
