"""A run that saves by itself, with batches to which random numbers are added."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import penstock as ps
from tests.support.models import mlp, uniform_plan

EPOCHS, ROWS = 2, 12  # of which a batch has two


class Augmented(Dataset[torch.Tensor]):
    """Rows to which random numbers of all three generators are added."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(()) + random.random() + float(np.random.rand())
        return torch.full((4,), float(index)) + 0.1 * drawn


def shuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True)


def with_a_generator() -> DataLoader[torch.Tensor]:
    sampler = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    return DataLoader(Augmented(), batch_size=2, sampler=sampler)


def with_workers() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=1)


class StoppedError(Exception):
    """The run ends here."""


class Run:
    """A run of a few epochs, as a script would have it.

    Args:
        folder: of its checkpoint.
        loader: of its batches.
        every: steps between two saves.
        parts: of a batch, whose gradients are accumulated.
        stages: of the pipeline.
        before: called before every step.
        **options: of the pipeline.

    Attributes:
        pipe: the pipeline.
        batches: the loader.
        seen: the batches that were trained.
        weights: at the end, if the run has come there.
    """

    def __init__(
        self,
        folder: Path,
        loader: Callable[[], Any] = shuffled,
        every: int = 2,
        parts: int = 1,
        stages: int = 2,
        before: Callable[[Run], None] = lambda run: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.folder, self.every, self.parts, self._before = folder, every, parts, before
        model = mlp(4, 8, 4)
        program = ps.capture(model, (torch.ones(2, 4),))
        plan = uniform_plan(program, stages, 2)
        options = {"devices": ["cpu"] * stages, "audit": None, **options}
        self.pipe = ps.Pipeline(model, program=program, plan=plan, **options)
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.batches = ps.Batches(loader())
        self.seen: list[torch.Tensor] = []
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def things(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.batches}

    def go(self, stop: int | None = None) -> dict[str, Any] | None:
        """Begin or go on, and end as so many batches were seen, with the step done or not."""
        with self.pipe:
            found = ps.resume(self.folder, self.pipe, **self.things)
            self.pipe.autosave(self.folder, every=self.every, **self.things)
            for _ in self.batches.epochs(EPOCHS):
                for drawn in self.batches:
                    x = drawn + torch.rand(())  # as a script does that mixes samples
                    if len(self.seen) == stop:
                        raise StoppedError
                    self._before(self)
                    for part in x.chunk(self.parts):
                        self.pipe.train_step(part, target=part, loss_fn=F.mse_loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.scheduler.step()
                    self.seen.append(x)
            self.weights = {n: t.detach().clone() for n, t in self.pipe.state_dict().items()}
        return found
