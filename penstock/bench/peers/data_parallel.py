"""`DistributedDataParallel` over gloo: each process has the model and a share of the batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.peers.peer import Peer, Place, Reading, seconds_between_barriers
from penstock.bench.peers.workload import Workload


@dataclass(frozen=True)
class Buckets:
    """How gradients are packed to be summed over the ranks.

    Attributes:
        megabytes: of a bucket; torch's default is 25.
        as_view: whether gradients are views of the buckets, which saves a copy of each.
    """

    megabytes: float = 25.0
    as_view: bool = True

    def __str__(self) -> str:
        return f"buckets of {self.megabytes:g} MB{', gradients as views' if self.as_view else ''}"


class Replica:
    """The whole model on one rank's share of the batch; gradients are averaged over the ranks.

    A rank runs every so-many-th micro-batch, as Penstock's replicas do. It accumulates their
    gradients, which are summed over the ranks only in the backward of the last.
    """

    def __init__(self, workload: Workload, buckets: Buckets, place: Place) -> None:
        place.join_gloo()
        self._model = DistributedDataParallel(
            workload.build(),
            bucket_cap_mb=buckets.megabytes,
            gradient_as_bucket_view=buckets.as_view,
        )
        self._loss_fn = workload.loss
        self._optimizer = workload.optimizer(self._model.parameters())
        m = workload.num_microbatches
        parts = [tensor.chunk(m)[place.rank :: place.size] for tensor in workload.data()]
        self._microbatches = [(x.clone(), y.clone()) for x, y in zip(*parts, strict=True)]
        self._ranks = place.size
        self._loss = 0.0

    def _accumulate(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        count = len(self._microbatches)
        losses = []
        for k, (inputs, target) in enumerate(self._microbatches):
            with nullcontext() if k == count - 1 else self._model.no_sync():
                loss = self._loss_fn(self._model(inputs), target) / count
                loss.backward()
            losses.append(loss.detach())
        self._loss = sum(loss.item() for loss in losses) / self._ranks

    def _step(self) -> None:
        self._accumulate()
        self._optimizer.step()

    def step(self) -> Reading:
        """One training step."""
        seconds = seconds_between_barriers(self._step)
        return Reading(seconds, self._loss)

    def gradients(self) -> list[NDArray[np.float32]]:
        """Those of the batch with the present weights, in the order of the parameters."""
        self._accumulate()
        return [
            np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
            for p in self._model.parameters()
        ]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def data_parallel(
    workload: Workload, *, processes: int = 2, buckets: Buckets | None = None
) -> Peer:
    """`DistributedDataParallel` on so many ranks, with one thread and an equal share each.

    Args:
        workload: what it trains. Every rank runs an equal number of its micro-batches, at least
            one.
        processes: how many ranks.
        buckets: how gradients are packed. By default buckets of torch's size, as views.

    Raises:
        ValueError: the micro-batches, or the rows, do not divide by the number of ranks.
    """
    count = max(processes, workload.num_microbatches)
    if count % processes:
        raise ValueError(
            f"{count} micro-batches do not divide by {processes} ranks; choose a multiple"
        )
    work = replace(workload, num_microbatches=count)
    build = partial(Replica, work, buckets or Buckets())
    return Peer(f"DistributedDataParallel, {processes} processes", [build] * processes)
