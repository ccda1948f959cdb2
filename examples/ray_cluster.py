"""Train a small model on the workers of a Ray cluster, and compare with one device.

    python examples/ray_cluster.py [--workers 2] [--steps 5] [--address ADDRESS]

Without an address, and without a cluster that runs, one is started on this machine. It needs
`pip install 'penstock[ray]'`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

MICROBATCHES = 4


def build_model() -> nn.Module:
    """Blocks with statistics; the same each time."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()] for _ in range(4)]
    return nn.Sequential(*(module for block in blocks for module in block), nn.Linear(64, 8))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets."""
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 64, generator=numbers), torch.randn(32, 8, generator=numbers))
        for _ in range(steps)
    ]


def train_in_cluster(workers: int, steps: int, address: str | None) -> list[torch.Tensor]:
    """The losses of a pipeline, and the weights at the end."""
    model, data = build_model(), batches(steps)
    options = ps.Ray(cpus=1, address=address)
    with ps.Pipeline(
        model,
        data[0][:1],
        devices=["cpu"] * workers,
        workers=options,
        num_microbatches=MICROBATCHES,
        replicas=1,  # the model is too small to gain by several workers; split it anyway
    ) as pipe:
        for member in pipe.members:
            print(f"worker {member.number}: process {member.pid} on {member.host}, {member.node}")
        print(pipe.plan.summary)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for x, y in data:
            losses.append(pipe.train_step(x, target=y, loss_fn=F.mse_loss))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *pipe.state_dict().values()]


def train_here(steps: int) -> list[torch.Tensor]:
    """The same in plain PyTorch, one micro-batch after the other."""
    torch.set_num_threads(1)  # as many as every worker has: bits depend on it
    model, losses = build_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(steps):
        total = torch.zeros(())
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        for inputs, target in parts:
            loss = F.mse_loss(model(inputs), target)
            (loss / MICROBATCHES).backward()
            total = total + loss.detach() / MICROBATCHES
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.state_dict().values()]


def main() -> None:
    """Train both, and say whether they have the same bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--address")
    given = parser.parse_args()
    ours = train_in_cluster(given.workers, given.steps, given.address)
    same = all(map(torch.equal, ours, train_here(given.steps)))
    print("losses:", " ".join(f"{float(loss):.6f}" for loss in ours[: given.steps]))
    print("the bits of one device" if same else "NOT the bits of one device")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
