"""Data parallelism as `nn.DataParallel` does it, with a process for each device.

`nn.DataParallel` itself needs GPUs. In every step the first device, which alone has the batch, the
loss and the optimizer,

1. sends its weights and buffers to the others, and to each its share of the batch's rows;
2. gathers their outputs, and computes the loss of the whole batch;
3. sends each its part of the outputs' gradient;
4. adds up the gradients of the weights that all have computed, and makes the optimizer's step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.bench.footprint import Held
from penstock.bench.peers.peer import Peer, Place, TrainingRank
from penstock.bench.peers.workload import Workload

_FIRST = 0


class GatheringRank(TrainingRank):
    """The whole model, on a share of the batch. Outputs are gathered into one tensor, uncopied."""

    def __init__(self, workload: Workload, place: Place) -> None:
        place.join()
        self._place = place
        self._model = workload.build()
        self._whole_loss: Tensor | None = None
        self._head = _Head(workload, self._model, place) if place.rank == _FIRST else None
        shares = self._head.shares if self._head else None
        like: list[Any] = [None if shares is None else (shares[0].shape, shares[0].dtype)]
        dist.broadcast_object_list(like, _FIRST)
        self._like = like[0]

    def _train(self) -> None:
        head = self._head
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            dist.broadcast(tensor.detach(), _FIRST)
        shape, dtype = self._like
        own = torch.empty(shape, dtype=dtype)
        dist.scatter(own, head.shares if head else None, _FIRST)
        output = self._model(own)
        if head is None:
            dist.gather(output.detach(), None, _FIRST)
        else:
            whole = output.new_empty(self._place.size * len(output), *output.shape[1:])
            dist.gather(output.detach(), list(whole.chunk(self._place.size)), _FIRST)
            self._whole_loss = head.backward(whole)
        gradient = torch.empty_like(output)
        parts = list(whole.grad.chunk(self._place.size)) if head else None
        dist.scatter(gradient, parts, _FIRST)
        output.backward(gradient)
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.reduce(parameter.grad, _FIRST)
        if head is not None:
            head.optimizer.step()
        self._model.zero_grad(set_to_none=True)

    def _loss(self) -> float:
        return 0.0 if self._whole_loss is None else self._whole_loss.item()

    def held(self) -> list[Held]:
        """The memory of this process."""
        return [Held.by()]


class _Head:
    """What the first device alone has."""

    def __init__(self, workload: Workload, model: nn.Module, place: Place) -> None:
        inputs, self._target = workload.data()
        self.shares = list(inputs.chunk(place.size))
        self.optimizer = workload.optimizer(model.parameters())
        self._loss_fn = workload.loss

    def backward(self, whole: Tensor) -> Tensor:
        """The loss of the whole batch, detached; its gradient is in the outputs' `.grad`."""
        loss = self._loss_fn(whole.requires_grad_(), self._target)
        loss.backward()
        return loss.detach()


def gathering(workload: Workload, *, processes: int = 2) -> Peer:
    """The scheme of `nn.DataParallel` on so many processes, with one thread and an equal share
    each.

    Raises:
        ValueError: the batch does not divide into equal shares.
    """
    build = partial(GatheringRank, replace(workload, num_microbatches=processes))
    return Peer(f"gathering as nn.DataParallel, {processes} processes", [build] * processes)
