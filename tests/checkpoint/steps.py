"""A small training run, in parts."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan
from tests.workers.ranks.steps import X, small

GROUPS = [{"params": "*.weight", "weight_decay": 0.1}, {"params": "*", "weight_decay": 0.0}]


class Run:
    """BatchNorm, dropout, a tied weight; AdamW with two groups, a scheduler, noise in the data.

    Args:
        stages: of the pipeline.
        **options: of the pipeline.
    """

    def __init__(self, stages: int = 2, **options: Any) -> None:
        model = small()
        program = ps.capture(model, (X,))
        plan = uniform_plan(program, stages, 3)
        self.pipe = ps.Pipeline(model, (X,), program=program, plan=plan, **options)
        self.optimizer = self.pipe.optimizer(torch.optim.AdamW, GROUPS, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=200)
        self.generator = torch.Generator().manual_seed(3)
        self.losses: list[float] = []
        torch.manual_seed(5)
        np.random.seed(6)
        random.seed(7)

    @property
    def things(self) -> dict[str, Any]:
        """What has a state."""
        return {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
        }

    def go(self, steps: int) -> None:
        """Train; all four generators have a say in the data."""
        for _ in range(steps):
            scale = 1 + 0.1 * (torch.rand(()).item() + np.random.rand() + random.random())
            noise = torch.randn(X.shape, generator=self.generator)
            self.optimizer.zero_grad()
            loss = self.pipe.train_step(
                X + 0.1 * noise, target=scale * X.roll(1, 0), loss_fn=F.mse_loss
            )
            self.pipe.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())

    def save(self, path: Path, **options: Any) -> Any:
        """Save everything."""
        return self.pipe.save(path, **self.things, data={"losses": self.losses}, **options)

    def restore(self, path: Path) -> None:
        """Go on from there."""
        data = ps.load(path).restore(self.pipe, **self.things)
        self.losses = data["data"]["losses"]

    def state(self) -> dict[str, Any]:
        """Everything that must be the same in the end."""
        return {
            "losses": self.losses,
            "model": copy.deepcopy(self.pipe.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
        }


def uninterrupted(steps: int) -> dict[str, Any]:
    """How the run ends on two threads."""
    run = Run(workers="threads", devices=["cpu"] * 2)
    with run.pipe:
        run.go(steps)
        return run.state()
