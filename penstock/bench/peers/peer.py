"""What the harness sees of a peer, and what the peers' processes answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from penstock.bench.peers.processes import Build, PeerProcesses


class Peer(Protocol):
    """A way of training one model that was started once and waits, idle, for its next step."""

    name: str

    @property
    def loss(self) -> float:
        """The batch's loss in the last step."""

    def step(self) -> float:
        """Run one training step; its seconds, between barriers, on the slowest rank."""

    def close(self) -> None:
        """End all processes of the peer, and free what it holds."""


class Reading(NamedTuple):
    """One rank's account of a step: its seconds, and its share of the batch's loss.

    The shares of all ranks add up to the loss.
    """

    seconds: float
    loss: float = 0.0


class CrewPeer:
    """A `Peer` whose ranks are `PeerProcesses`; their servants answer `step`."""

    def __init__(
        self,
        name: str,
        builds: Sequence[Build],
        *,
        threads: int = 1,
        timeout: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._loss = float("nan")
        self._processes = PeerProcesses(
            name, builds, threads=threads, timeout=timeout, environment=environment
        )

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        return self._processes.pids

    @property
    def loss(self) -> float:
        """The batch's loss in the last step; not a number before the first."""
        return self._loss

    def step(self, *settings: Any) -> float:
        """Run one training step; its seconds, between barriers, on the slowest rank.

        Args:
            *settings: of this step alone, for peers whose ranks take some.

        Raises:
            RuntimeError: a process failed, died or took too long; the peer is closed.
        """
        readings: list[Reading] = self._processes.call("step", *settings)
        self._loss = sum(reading.loss for reading in readings)
        return max(reading.seconds for reading in readings)

    def close(self) -> None:
        """End every process; may be repeated."""
        self._processes.close()


def seconds_between_barriers(body: Callable[[], None]) -> float:
    """How long every rank of the default process group needs to run its `body`."""
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start
