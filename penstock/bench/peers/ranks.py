"""Penstock as a peer: each process is a rank of a launch, and has a replica of the model."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.bench.peers.peer import Place, Recipe, TrainingRank
from penstock.bench.peers.workload import Workload
from penstock.pipeline import Pipeline


class Rank(TrainingRank):
    """A rank with a replica of the whole model, which runs its share of the micro-batches."""

    def __init__(self, workload: Workload, place: Place) -> None:
        place.join()
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
        self._inputs, self._target = workload.data()
        self._loss_fn = workload.loss
        self._pipe = Pipeline(
            workload.build().train(),
            (self._inputs,),
            replicas=place.size,
            num_microbatches=workload.num_microbatches,
            workers="torchrun",
            progress=None,
        )
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=workload.learning_rate)
        self._ranks = place.size
        self._whole_loss = torch.zeros(())

    def _accumulate(self) -> None:
        self._optimizer.zero_grad()
        self._whole_loss = self._pipe.train_step(
            self._inputs, target=self._target, loss_fn=self._loss_fn
        )

    def _train(self) -> None:
        self._accumulate()
        self._optimizer.step()

    def _loss(self) -> float:
        return self._whole_loss.item() / self._ranks

    def gradients(self) -> list[NDArray[np.float32]]:
        """The gradients of the batch at the current weights, in the order of the parameters."""
        self._accumulate()
        return [
            np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
            for p in self._pipe.model.parameters()
        ]

    def weights(self) -> list[NDArray[np.float32]]:
        """The parameters as they are now."""
        return [parameter.detach().numpy() for parameter in self._pipe.model.parameters()]

    def close(self) -> None:
        """Leave the other ranks."""
        self._pipe.close()
        super().close()


def replicas_on_ranks(workload: Workload, *, processes: int = 2) -> Recipe:
    """Penstock with a replica on each of so many ranks, with one thread each.

    Args:
        workload: what it trains.
        processes: how many ranks.
    """
    builds = [partial(Rank, workload)] * processes
    return Recipe(f"Penstock, {processes} ranks", builds)
