"""The memory of every process that trains with replicas, beside a scheme that gathers on one.

Penstock's replicas are worker processes, which another process drives as a user's script does. The
other scheme is that of `nn.DataParallel` (`penstock.bench.peers.gathering`). All processes have one
intra-op thread and keep freed memory, so what they have after some steps is the most that they have
needed. The memory of the interpreter and of libraries is measured with a tiny model, and
subtracted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.bench.footprint import Held
from penstock.bench.peers.gathering import gathering
from penstock.bench.peers.peer import Peer, Place, Reading
from penstock.bench.peers.workload import Workload
from penstock.bench.subjects import numbers
from penstock.bench.turns import timed
from penstock.bench.uniform import replicated_plan
from penstock.capture import capture
from penstock.devices.cores import only_cores
from penstock.display.tables import Row, aligned
from penstock.pipeline import Pipeline
from penstock.units import show_bytes

_WIDTH = 4  # features of the tiny model
_DRIVER = "driver"


@dataclass(frozen=True)
class Process:
    """The memory of one process.

    Attributes:
        name: its role: `replica 0`, `device 0` and so on, or `driver`.
        at_rest: its memory after steps of a tiny model.
        training: its memory after steps of the model that is measured.
    """

    name: str
    at_rest: Held
    training: Held

    @property
    def private(self) -> int:
        """Bytes that no other process has, beyond those at rest."""
        return self.training.private - self.at_rest.private

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "private_for_the_model": self.private}


@dataclass(frozen=True)
class Scheme:
    """One way of training, in several processes.

    Attributes:
        name: what it is called.
        processes: those that have a replica or stand for a device, in order, and then the driver
            if it is a process of its own.
    """

    name: str
    processes: tuple[Process, ...]

    @property
    def workers(self) -> tuple[Process, ...]:
        """The processes that run the model."""
        return tuple(process for process in self.processes if process.name != _DRIVER)

    @property
    def shared(self) -> int:
        """Bytes of shared memory beyond those at rest; a page of several processes counts once."""
        return sum(process.training.part - process.at_rest.part for process in self.processes)

    @property
    def total(self) -> int:
        """Bytes of all processes, beyond those at rest."""
        return self.shared + sum(process.private for process in self.processes)

    @property
    def imbalance(self) -> float:
        """The first worker's private memory for the model, as a multiple of the others' mean."""
        first, *others = (worker.private for worker in self.workers)
        return first / max(1.0, sum(others) / len(others))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, in bytes."""
        return {
            "name": self.name,
            "processes": [process.to_dict() for process in self.processes],
            "shared_counted_once": self.shared,
            "total": self.total,
            "first_over_others": self.imbalance,
        }


@dataclass(frozen=True)
class Memory:
    """The memory that training a model takes in both schemes.

    Attributes:
        model: what it is called.
        replicas: how many there are, and devices in the other scheme.
        schemes: Penstock's, and the other.
    """

    model: str
    replicas: int
    schemes: tuple[Scheme, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, in bytes."""
        return {
            "model": self.model,
            "replicas": self.replicas,
            "schemes": [scheme.to_dict() for scheme in self.schemes],
        }

    def lines(self, width: int | None = None) -> list[str]:
        """The same as a table."""
        cells: list[Row] = [(self.model, "at rest", "for the model", "maps of the shared")]
        for scheme in self.schemes:
            cells.append((scheme.name, "", "", ""))
            for each in scheme.processes:
                mapped = each.training.shared - each.at_rest.shared
                sizes = (each.at_rest.private, each.private, mapped)
                cells.append((f"  {each.name}", *map(show_bytes, sizes)))
            whole = f"  all: {show_bytes(scheme.shared)} shared, counted once"
            cells.append((whole, "", show_bytes(scheme.total), ""))
        return aligned(cells, width=width)


class ReplicaDriver:
    """A process that trains with replicas in worker processes."""

    def __init__(self, workload: Workload, _: Place) -> None:
        self._inputs, self._target = workload.data()
        self._loss_fn = workload.loss
        replicas = workload.num_microbatches
        program = capture(workload.build().train(), (self._inputs,))
        with only_cores(replicas):
            self._pipe = Pipeline(
                program.model,
                devices=["cpu"] * replicas,
                program=program,
                plan=replicated_plan(program, replicas),
                workers="processes",
            )
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=workload.learning_rate)

    def step(self) -> Reading:
        """One training step."""
        losses: list[torch.Tensor] = []

        def work() -> None:
            self._optimizer.zero_grad()
            losses.append(
                self._pipe.train_step(self._inputs, target=self._target, loss_fn=self._loss_fn)
            )
            self._optimizer.step()

        return Reading(timed(work)(), losses[0].item())

    def held(self) -> list[Held]:
        """The memory of every worker, and at the end that of this process."""
        pids = [member.pid for member in self._pipe._workers.members]
        return [*map(Held.by, pids), Held.by()]

    def close(self) -> None:
        """Close the pipeline, which ends its workers."""
        self._pipe.close()


def with_replicas(workload: Workload) -> Peer:
    """A peer of one process, which drives one replica for each micro-batch."""
    name = f"Penstock, {workload.num_microbatches} replicas"
    return Peer(name, [partial(ReplicaDriver, workload)])


def measure_memory(model: str, workload: Workload, steps: int) -> Memory:
    """Train with Penstock and with the gathering scheme, one after the other.

    Args:
        model: the name of the model.
        workload: what is trained; it has one micro-batch for each replica.
        steps: the number of steps before the memory is read.

    Raises:
        OSError: the kernel does not say how much memory processes have: this is not Linux.
        RuntimeError: a process failed.
    """
    count = workload.num_microbatches
    nothing = Workload(_few_numbers, partial(numbers, count, _WIDTH), F.mse_loss, count)
    schemes = {
        "Penstock": (with_replicas, [*(f"replica {k}" for k in range(count)), _DRIVER]),
        "gathered on the first device": (_gathering, [f"device {k}" for k in range(count)]),
    }
    found = []
    for name, (start, names) in schemes.items():
        held = [_after(start(each), steps) for each in (nothing, workload)]
        processes = tuple(starmap(Process, zip(names, *held, strict=True)))
        found.append(Scheme(name, processes))
    return Memory(model, count, tuple(found))


def _after(peer: Peer, steps: int) -> list[Held]:
    """The memory of every process of a peer after this many steps; closes the peer."""
    try:
        for _ in range(steps):
            peer.step()
        return [held for rank in peer.call("held") for held in rank]
    finally:
        peer.close()


def _gathering(workload: Workload) -> Peer:
    return gathering(workload, processes=workload.num_microbatches)


def _few_numbers() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH))
