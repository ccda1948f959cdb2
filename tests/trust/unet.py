"""A small 3-D U-Net whose activations outweigh its weights, and what running it takes in memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps


class Block(nn.Module):
    """Convolves twice, normalises in between, adds what it was given, and masks it with that."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.one = nn.Conv3d(inside, outside, 3, padding=1)
        self.norm = nn.InstanceNorm3d(outside)
        self.two = nn.Conv3d(outside, outside, 3, padding=1)
        self.skip = nn.Conv3d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.norm(self.one(x)))
        h = F.gelu(self.two(h) + self.skip(x))
        return h * torch.sigmoid(h)


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(1, 8), Block(8, 16), Block(16, 32)])
        self.up = nn.ModuleList([Block(48, 16), Block(24, 8)])
        self.head = nn.Conv3d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool3d(x, 2)
        x = self.down[-1](x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def now() -> int:
    """Bytes of memory that it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Print how much more memory one of the ways needs than the model itself."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, frozen = UNet(), sys.argv[2] == "frozen"
    model.requires_grad_(not frozen)
    x = torch.randn(4, 1, 32, 32, 32)
    ps.capture(nn.Linear(2, 2), (torch.ones(2, 2),))  # what is imported late
    start = now()
    if sys.argv[1] == "plain":
        result = model(x.requires_grad_())
        result.square().mean().backward()
    else:
        program = ps.capture(model, (x,))
        if sys.argv[1] == "profile":
            ps.profile(program, devices=["cpu"], num_microbatches=1)
    print(peak() - start)


if __name__ == "__main__":
    main()
