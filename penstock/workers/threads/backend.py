"""Threads before they have a plan: there are none yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.devices.choice import Devices
from penstock.errors import InputError
from penstock.links.local import LocalLink
from penstock.plan import Plan
from penstock.workers.backend import DrivenBackend, Workers, timeout_of
from penstock.workers.gate import gate_of
from penstock.workers.probe import adding_here, overhead_here, ping, pong
from penstock.workers.threads.pool import ThreadPool
from penstock.workers.threads.workers import ThreadWorkers

_TIMEOUT = 10.0  # seconds that measuring a link may take


class ThreadBackend(DrivenBackend):
    """Threads of this process, which start when there is a plan.

    Args:
        devices, least, threads: as of `DrivenBackend`.
    """

    def __init__(self, devices: Devices | None, least: int = 1, threads: int = 0) -> None:
        super().__init__(devices, least, threads)
        self.probe = ThreadProbe()
        if any(device.type != "cpu" for device in self.devices):
            self.why_one_replica = (
                "There is one replica, as replicas in threads were never measured on such devices; "
                "replicas=2 asks for them."
            )

    def check_replicas(self, replicas: int) -> None:
        """Raise unless they compute the same bits, as far as the kind of device is concerned.

        Raises:
            InputError: they do not.
        """
        if replicas > 1 and len({device.type for device in self.devices}) > 1:
            raise InputError(
                f"replicas={replicas} need devices of one kind, and there are "
                f"{', '.join(map(str, self.devices))}; replicas=1 splits the model over them"
            )

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Start one thread per device, each with its share of the cores."""
        seconds = timeout_of(plan, timeout)
        return ThreadWorkers(plan, self.in_order(plan), self.threads, seconds, gate_of(model))


class ThreadProbe:
    """Threads, which are made for the purpose."""

    overlaps = True

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """On one device a reference is enough."""
        return one != other

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """The seconds there and back through a `LocalLink`, by round."""
        link = LocalLink(one, other)
        jobs = (partial(ping, link, one, size, rounds), partial(pong, link, other, rounds))
        found: list[float] = _run((one, other), jobs, link.abort, link.reset)[0]
        return found

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """The larger overhead of two threads that are linked."""
        link = LocalLink(one, other)
        jobs = (partial(overhead_here, 0, link, one), partial(overhead_here, 1, link, other))
        return float(max(_run((one, other), jobs, link.abort, link.reset)))

    def adding(self, one: torch.device, other: torch.device) -> float:
        """The larger cost of adding in order, of two threads at the same time."""
        jobs = [partial(adding_here, device) for device in (one, other)]
        return float(max(_run((one, other), jobs, _nothing, _nothing)))


def _nothing() -> None:
    """Neither waits for the other."""


def _run(
    devices: Sequence[torch.device],
    jobs: Sequence[Callable[[], Any]],
    abort: Callable[[], None],
    reset: Callable[[], None],
) -> list[Any]:
    """Run one job on a worker of each device."""
    pool = ThreadPool(devices, threads=1, abort=abort, reset=reset)
    try:
        return pool.run(jobs, _TIMEOUT)
    finally:
        pool.close()
        pool.join(_TIMEOUT)
