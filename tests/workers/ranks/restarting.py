"""A run that is killed in its first attempt: `restarting.py DIRECTORY VICTIM RANKS`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan

STEPS, KILLED = 5, 3
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def parts(count: int) -> nn.Sequential:
    """The model: a part for every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(count)))


def train(directory: Path, victim: int, ranks: int) -> None:
    """A checkpoint after every step; the victim is killed before the fourth."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = parts(ranks)
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, ranks, 2)
    with ps.Pipeline(model, (X,), program=program, plan=plan) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        first = 0
        if (directory / "run").exists():
            first = ps.load(directory / "run").restore(pipe, optimizer=optimizer)["step"]
        (directory / f"{rank} from {first} in {attempt}").touch()
        for step in range(first, STEPS):
            if attempt == 0 and step == KILLED and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            pipe.train_step(X, target=X, loss_fn=F.mse_loss)
            optimizer.step()
            pipe.save(directory / "run", optimizer=optimizer, step=step + 1)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
