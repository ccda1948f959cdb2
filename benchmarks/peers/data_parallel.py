"""`DistributedDataParallel` over gloo: each process has the model and a share of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.peers.models import Task, loss_function, resnet50
from penstock.bench.peers.peer import CrewPeer, Peer, Reading, seconds_between_barriers
from penstock.bench.peers.processes import Place


class Replica:
    """The whole model on one rank's share of the batch; gradients are averaged over the ranks."""

    def __init__(self, task: Task, model_seed: int, place: Place) -> None:
        place.join_gloo()
        # Buckets as views of the gradients save a copy of each; nothing else is worth changing.
        self._model = DistributedDataParallel(resnet50(model_seed), gradient_as_bucket_view=True)
        self._optimizer = task.optimizer(self._model.parameters())
        images, target = task.data()
        self._images = images.chunk(place.size)[place.rank].clone()
        self._target = target.chunk(place.size)[place.rank].clone()
        self._share = 1 / place.size
        self._loss: Tensor | None = None

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._loss = loss_function(self._model(self._images), self._target)
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


def data_parallel(
    *,
    batch: int,
    image: int,
    processes: int = 2,
    learning_rate: float = 0.001,
    model_seed: int = 0,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> Peer:
    """`DistributedDataParallel` on `processes` ranks with one thread and an equal share each."""
    # Every rank's share is one micro-batch, as far as BatchNorm and divisibility are concerned.
    task = Task(batch, image, processes, learning_rate)
    build = partial(Replica, task, model_seed)
    name = f"DistributedDataParallel, {processes} processes"
    return CrewPeer(name, [build] * processes, timeout=timeout, environment=environment)
