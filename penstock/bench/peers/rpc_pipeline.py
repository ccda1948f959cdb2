"""A pipeline over `torch.distributed.rpc`, as in PyTorch's distributed pipeline tutorial.

A master that holds no stage cuts the batch into micro-batches and sends each through two workers;
remote references carry the activations from one worker to the next, distributed autograd runs the
backward, and a distributed optimizer steps the parameters where they live.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from penstock.bench.footprint import limit_arenas
from penstock.bench.peers.peer import HOST, Build, Peer, Place, Reading
from penstock.bench.peers.workload import Workload
from penstock.loading import tolerate_missing_torchvision_operators

_AT_A_TIME = 2
"""Micro-batches that a worker computes at a time, one forward and one backward. Its many threads
share as many arenas, or each would keep the memory of the micro-batches that it has had."""


class Shard:
    """One part of the model, in its worker; the lock keeps it to one micro-batch at a time."""

    def __init__(self, module: bytes) -> None:
        self._module: nn.Module = pickle.loads(module)
        self._lock = Lock()

    def forward(self, reference: Any) -> Tensor:
        """Fetch one micro-batch from wherever `reference` is owned, and run it."""
        microbatch = reference.to_here()
        with self._lock:
            output: Tensor = self._module(microbatch)
        return output

    def parameters(self) -> list[Any]:
        """References to the parameters, for the optimizer."""
        return [rpc.RRef(parameter) for parameter in self._module.parameters()]


class Worker:
    """A process that serves remote calls, and answers `step` because every rank must."""

    def __init__(self, workload: Workload, place: Place) -> None:
        _join(f"worker{place.rank}", place, workload)

    def step(self, microbatches: int | None = None) -> Reading:
        """A step of no seconds: the master calls and measures this worker's stage."""
        return Reading(0.0)

    def close(self) -> None:
        """Shut RPC down, together with all other ranks."""
        rpc.shutdown()


class Master(Worker):
    """The process that holds no stage and drives those that do."""

    def __init__(
        self,
        workload: Workload,
        stages: Sequence[bytes],
        place: Place,
    ) -> None:
        # Importing this warns of its own deprecation, which is no concern of the owner.
        from torch.distributed.optim import DistributedOptimizer

        _join("master", place, workload)
        self._inputs, self._target = workload.data()
        self._microbatches = workload.num_microbatches
        self._loss = workload.loss
        self._shards = [
            rpc.remote(f"worker{rank}", Shard, args=(stage,))
            for rank, stage in enumerate(stages, start=1)
        ]
        parameters = [p for shard in self._shards for p in shard.rpc_sync().parameters()]
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD, parameters, lr=workload.learning_rate
        )

    def _forward(self, microbatches: int) -> Tensor:
        first, *between, last = self._shards
        outputs = []
        for microbatch in self._inputs.tensor_split(microbatches):
            reference = first.remote().forward(rpc.RRef(microbatch))
            for shard in between:
                reference = shard.remote().forward(reference)
            outputs.append(last.rpc_async().forward(reference))
        return torch.cat(torch.futures.wait_all(outputs))

    def step(self, microbatches: int | None = None) -> Reading:
        """One training step; every remote call of it is over when the optimizer's has returned.

        Args:
            microbatches: their number, at most that of the workload, which is the default.
        """
        start = time.perf_counter()
        # Gradients live in the context, so there are none to clear.
        with dist_autograd.context() as context:
            loss = self._loss(self._forward(microbatches or self._microbatches), self._target)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            self._optimizer.step(context)
        return Reading(time.perf_counter() - start, loss.item())


def _join(name: str, place: Place, workload: Workload) -> None:
    limit_arenas(_AT_A_TIME)
    tolerate_missing_torchvision_operators()  # stages may be parts of its models
    # Torch warns here of deprecated calls of its own, whatever the filters are: warnings go to a
    # logger without handlers.
    logging.captureWarnings(True)
    options = rpc.TensorPipeRpcBackendOptions(
        # Calls that wait for an activation hold a thread each.
        num_worker_threads=16 + 2 * workload.num_microbatches,
        rpc_timeout=place.timeout,
        init_method=f"tcp://{HOST}:{place.port}",
        # Its shared-memory transport polls without pause: it takes most of a core from whoever else
        # is running, its own stages included. Sockets wait in the kernel.
        _transports=["uv"],
    )
    rpc.init_rpc(name, rank=place.rank, world_size=place.size, rpc_backend_options=options)


def rpc_pipeline(
    workload: Workload,
    stages: Sequence[nn.Module],
) -> Peer:
    """The RPC pipeline: a master and one worker per stage, one thread each.

    Its `step` takes a number of micro-batches up to the workload's, for that step alone.

    Args:
        workload: what it trains.
        stages: picklable modules, one tensor in and one tensor out, a worker for each.
    """
    shards = [pickle.dumps(stage) for stage in stages]
    builds: list[Build] = [partial(Master, workload, shards)]
    builds += [partial(Worker, workload)] * len(shards)
    return Peer(f"torch.distributed.rpc pipeline, m={workload.num_microbatches}", builds)
