"""Plain PyTorch in one process: on one core, or on several."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from penstock.bench.peers.peer import Place, Reading, Recipe
from penstock.bench.peers.workload import Workload


class OneProcess:
    """The whole model; more than one micro-batch means gradient accumulation."""

    def __init__(self, workload: Workload, _: Place) -> None:
        self._model = workload.build()
        self._loss = workload.loss
        self._optimizer = workload.optimizer(self._model.parameters())
        inputs, target = workload.data()
        m = workload.num_microbatches
        self._microbatches = list(zip(inputs.chunk(m), target.chunk(m), strict=True))

    def step(self) -> Reading:
        """One training step."""
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for inputs, target in self._microbatches:
            loss = self._loss(self._model(inputs), target) / len(self._microbatches)
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        seconds = time.perf_counter() - start
        return Reading(seconds, sum(loss.item() for loss in losses))

    def close(self) -> None:
        """Nothing to give back."""


def one_process(
    workload: Workload, *, threads: int = 1, environment: Mapping[str, str] | None = None
) -> Recipe:
    """One process; with one thread it is the single device that everything is compared with.

    Args:
        workload: what it trains.
        threads: the number of intra-op threads.
        environment: more environment variables. `{"OMP_WAIT_POLICY": "passive"}` lets its threads
            sleep where they wait; by default they spin for a while, which is faster unless somebody
            else wants their cores.
    """
    build = partial(OneProcess, workload)
    name = f"one process, threads: {threads}"
    return Recipe(name, [build], threads, environment or {})
