"""Plain PyTorch in one process: on one core, or on all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

from penstock.bench.peers.models import Task, loss_function, resnet50
from penstock.bench.peers.peer import CrewPeer, Peer, Reading
from penstock.bench.peers.processes import Place


class OneProcess:
    """The whole model; more than one micro-batch means gradient accumulation."""

    def __init__(self, task: Task, model_seed: int, place: Place) -> None:
        self._model = resnet50(model_seed)
        self._optimizer = task.optimizer(self._model.parameters())
        images, target = task.data()
        m = task.num_microbatches
        self._microbatches = list(zip(images.chunk(m), target.chunk(m), strict=True))

    def step(self) -> Reading:
        """One training step."""
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for images, target in self._microbatches:
            loss = loss_function(self._model(images), target) / len(self._microbatches)
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        seconds = time.perf_counter() - start
        return Reading(seconds, sum(loss.item() for loss in losses))

    def close(self) -> None:
        """Nothing to give back."""


def one_core(
    *,
    batch: int,
    image: int,
    microbatches: int = 1,
    learning_rate: float = 0.001,
    model_seed: int = 0,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> Peer:
    """One process with one thread: the single device that everything is compared with."""
    task = Task(batch, image, microbatches, learning_rate)
    build = partial(OneProcess, task, model_seed)
    return CrewPeer("one process, one core", [build], timeout=timeout, environment=environment)


def all_cores(
    *,
    batch: int,
    image: int,
    microbatches: int = 1,
    threads: int | None = None,
    learning_rate: float = 0.001,
    model_seed: int = 0,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> Peer:
    """One process with `threads` intra-op threads; as many as it may use cores by default.

    `environment={"OMP_WAIT_POLICY": "passive"}` lets its threads sleep where they wait; by default
    they spin for a while, which is faster unless somebody else wants their cores.
    """
    task = Task(batch, image, microbatches, learning_rate)
    return CrewPeer(
        "one process, all cores",
        [partial(OneProcess, task, model_seed)],
        threads=threads or len(os.sched_getaffinity(0)),
        timeout=timeout,
        environment=environment,
    )
