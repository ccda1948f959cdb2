"""The backend of threads, which start only when there is a plan."""

from __future__ import annotations

from torch import nn

from penstock.devices.choice import Devices
from penstock.errors import InputError
from penstock.plan import Plan
from penstock.workers.backend import DrivenBackend, Workers, timeout_of
from penstock.workers.gate import gate_of
from penstock.workers.thread_probe import ThreadProbe
from penstock.workers.threads.workers import ThreadWorkers, runs_in_caller


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
                "There is one replica, as replicas in threads were never measured on several "
                "such devices; replicas=2 asks for them."
            )

    def check_replicas(self, replicas: int) -> None:
        """Raise if several replicas would run on different kinds of devices, with different bits.

        Raises:
            InputError: they would.
        """
        if replicas > 1 and len({device.type for device in self.devices}) > 1:
            raise InputError(
                f"replicas={replicas} need devices of one kind, and there are "
                f"{', '.join(map(str, self.devices))}; replicas=1 splits the model over them"
            )

    def start(self, plan: Plan, model: nn.Module, timeout: float | None) -> Workers:
        """Start one thread per device, each with its share of the cores.

        If there is only one, on a CPU, and nobody has asked for a `timeout`, the script's own
        thread runs the passes that it waits for.
        """
        devices, seconds = self.in_order(plan), timeout_of(plan, timeout)
        in_caller = timeout is None and runs_in_caller(devices)
        return ThreadWorkers(plan, devices, self.threads, seconds, gate_of(model), in_caller)
