"""Train in a TorchTrainer of Ray Train, whose workers are the ranks of a pipeline.

    python examples/ray_train.py [--workers 2] [--epochs 3]

A run that loses a worker goes on from the last checkpoint, with the same bits. It needs `pip
install 'penstock[ray]' 'ray[train]'`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F

import penstock as ps

MICROBATCHES, STEPS = 4, 10


def build_model() -> nn.Module:
    """Blocks with statistics; the same each time."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(*(module for block in blocks for module in block), nn.Linear(64, 8))


def batches(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, the same on every rank: a pipeline splits each batch itself."""
    numbers = torch.Generator().manual_seed(epoch)
    return [
        (torch.randn(32, 64, generator=numbers), torch.randn(32, 8, generator=numbers))
        for _ in range(STEPS)
    ]


def train(config: dict[str, Any]) -> None:
    """What every worker of Ray Train runs."""
    example, _ = batches(0)[0]
    with ps.Pipeline(build_model(), (example,), num_microbatches=MICROBATCHES) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
        first = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                first = ps.load(folder).restore(pipe, optimizer=optimizer)["epoch"] + 1
        for epoch in range(first, config["epochs"]):
            for x, y in batches(epoch):
                optimizer.zero_grad()
                loss = pipe.train_step(x, target=y, loss_fn=F.mse_loss)
                optimizer.step()
            # All ranks save: each writes what it has, into one folder that all of them can reach.
            folder = f"{config['folder']}/epoch-{epoch}"
            pipe.save(folder, optimizer=optimizer, epoch=epoch)
            is_first = ray.train.get_context().get_world_rank() == 0
            ray.train.report(
                {"epoch": epoch, "loss": loss.item()},
                checkpoint=Checkpoint(folder) if is_first else None,
            )


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": options.epochs, "folder": folder},
            scaling_config=ScalingConfig(num_workers=options.workers),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        found = trainer.fit()
    print(f"loss {found.metrics['loss']:.6f} after epoch {found.metrics['epoch']}")


if __name__ == "__main__":
    main()
