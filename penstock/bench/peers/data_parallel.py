"""Data parallelism of PyTorch's: each process runs the model on a share of the batch."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.bench.peers.peer import Place, Recipe, TrainingRank
from penstock.bench.peers.workload import Workload


@dataclass(frozen=True)
class Buckets:
    """How gradients are packed to be summed over the ranks.

    Attributes:
        megabytes: the size of a bucket in MiB (`bucket_cap_mb`); torch's default is 25.
        as_view: whether gradients are views of the buckets, which saves a copy of each.
    """

    megabytes: float = 25.0
    as_view: bool = True

    def __str__(self) -> str:
        return f"buckets of {self.megabytes:g} MB{', gradients as views' if self.as_view else ''}"


class _Ranks(TrainingRank):
    """A rank's share of the batch; gradients are averaged over the ranks.

    Micro-batches are dealt to the ranks in turn, as to Penstock's replicas of one machine. A rank
    accumulates the gradients of its own, which are summed over the ranks only in the backward of
    the last.
    """

    def __init__(self, workload: Workload, place: Place) -> None:
        self.device = place.join(workload.devices)
        self._model = self._shared(workload.build().to(self.device))
        self._loss_fn = workload.loss
        self._modes = workload.modes
        self._optimizer = workload.optimizer(self._model.parameters())
        m = workload.num_microbatches
        parts = [tensor.chunk(m)[place.rank :: place.size] for tensor in workload.data()]
        self._microbatches = [
            (x.clone().to(self.device), y.clone().to(self.device))
            for x, y in zip(*parts, strict=True)
        ]
        self._ranks = place.size
        self._losses: list[Tensor] = []

    @abstractmethod
    def _shared(self, model: nn.Module) -> nn.Module:
        """Wrap the model, so that all ranks train one."""

    @abstractmethod
    def _summing(self, is_last: bool) -> AbstractContextManager[Any]:
        """A context for a micro-batch, whose backward sums over the ranks only if `is_last`."""

    def _accumulate(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        count = len(self._microbatches)
        self._losses = []
        for k, (inputs, target) in enumerate(self._microbatches):
            with self._summing(k == count - 1):
                with self._modes(self.device):
                    loss = self._loss_fn(self._model(inputs), target) / count
                loss.backward()
            self._losses.append(loss.detach())

    def _train(self) -> None:
        self._accumulate()
        self._optimizer.step()

    def _loss(self) -> float:
        return sum(loss.item() for loss in self._losses) / self._ranks


class Replica(_Ranks):
    """The whole model on every rank."""

    def __init__(self, workload: Workload, buckets: Buckets, place: Place) -> None:
        self._buckets = buckets
        super().__init__(workload, place)

    def _shared(self, model: nn.Module) -> nn.Module:
        self._copy = DistributedDataParallel(
            model,
            bucket_cap_mb=self._buckets.megabytes,
            gradient_as_bucket_view=self._buckets.as_view,
        )
        return self._copy

    def _summing(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self._copy.no_sync()

    def gradients(self) -> list[NDArray[np.float32]]:
        """The gradients of the batch at the current weights, in the order of the parameters."""
        self._accumulate()
        return [
            np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
            for p in self._model.parameters()
        ]


class Shards(_Ranks):
    """A part of every parameter on every rank."""

    def __init__(self, workload: Workload, by_child: bool, frees: bool, place: Place) -> None:
        self._by_child, self._frees = by_child, frees
        super().__init__(workload, place)

    def _shared(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for part in (*(model.children() if self._by_child else ()), model):
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh, reshard_after_forward=self._frees)
        self._whole: Any = model
        return model

    def _summing(self, is_last: bool) -> AbstractContextManager[Any]:
        self._whole.set_requires_gradient_sync(is_last)
        if not self._frees:  # then weights stay until the optimizer has changed them
            self._whole.set_reshard_after_backward(is_last)
        return nullcontext()


def data_parallel(
    workload: Workload, *, processes: int = 2, buckets: Buckets | None = None
) -> Recipe:
    """`DistributedDataParallel` on so many ranks, with one thread and an equal share each.

    Args:
        workload: what it trains. Every rank runs an equal number of its micro-batches, at least
            one.
        processes: how many ranks.
        buckets: how gradients are packed. By default buckets of torch's size, as views.

    Raises:
        ValueError: the micro-batches, or the rows, do not divide by the number of ranks.
    """
    build = partial(Replica, _dealt(workload, processes), buckets or Buckets())
    return Recipe(f"DistributedDataParallel, {processes} processes", [build] * processes)


def sharded(
    workload: Workload, *, processes: int = 2, by_child: bool = False, frees: bool = False
) -> Recipe:
    """`fully_shard` (FSDP2) on so many ranks, with one thread and an equal share each.

    Args:
        workload: as of `data_parallel`.
        processes: how many ranks.
        by_child: whether every child of the model is gathered by itself.
        frees: whether weights that were gathered for a forward are freed after it, and gathered
            again for the backward.

    Raises:
        ValueError: as `data_parallel`.
    """
    build = partial(Shards, _dealt(workload, processes), by_child, frees)
    return Recipe(f"FSDP2, {processes} processes", [build] * processes)


def _dealt(workload: Workload, processes: int) -> Workload:
    """The workload, in at least one micro-batch for each rank, and equally many for all."""
    count = max(processes, workload.num_microbatches)
    if count % processes:
        raise ValueError(
            f"{count} micro-batches do not divide by {processes} ranks; choose a multiple"
        )
    return replace(workload, num_microbatches=count)
