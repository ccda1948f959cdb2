"""`DistributedDataParallel` over gloo: each process has the model and a share of the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.peers.peer import Peer, Place, Reading, seconds_between_barriers
from penstock.bench.peers.workload import Workload


class Replica:
    """The whole model on one rank's share of the batch; gradients are averaged over the ranks."""

    def __init__(self, workload: Workload, place: Place) -> None:
        place.join_gloo()
        # Buckets as views of the gradients save a copy of each; nothing else is worth changing.
        self._model = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
        self._loss_fn = workload.loss
        self._optimizer = workload.optimizer(self._model.parameters())
        inputs, target = workload.data()
        self._inputs = inputs.chunk(place.size)[place.rank].clone()
        self._target = target.chunk(place.size)[place.rank].clone()
        self._share = 1 / place.size
        self._loss: Tensor | None = None

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss = self._loss_fn(self._model(self._inputs), self._target)
        self._loss.backward()
        self._optimizer.step()

    def step(self) -> Reading:
        """One training step."""
        seconds = seconds_between_barriers(self._step)
        assert self._loss is not None
        return Reading(seconds, self._loss.item() * self._share)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def data_parallel(workload: Workload, *, processes: int = 2) -> Peer:
    """`DistributedDataParallel` on `processes` ranks with one thread and an equal share each."""
    # Every rank's share is one micro-batch, as far as BatchNorm and divisibility are concerned.
    build = partial(Replica, replace(workload, num_microbatches=processes))
    return Peer(f"DistributedDataParallel, {processes} processes", [build] * processes)
