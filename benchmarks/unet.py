"""A small 3-D U-Net whose activations outweigh its weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Convolves twice, normalises in between, adds what it was given, and masks it with that."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.one = nn.Conv3d(inside, outside, 3, padding=1)
        self.norm = nn.InstanceNorm3d(outside)
        self.two = nn.Conv3d(outside, outside, 3, padding=1)
        self.skip = nn.Conv3d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values as they are after it."""
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
        """Volumes (rows, 1, depth, height, width) as four values for each of their points."""
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool3d(x, 2)
        x = self.down[-1](x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        result: torch.Tensor = self.head(x)
        return result
