"""Batches that are not on the device of the model's weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.simulated.module import install, simulated

install()


class WithLoss(nn.Module):
    """Small and with a loss, so sizes are compared by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.other(torch.tanh(self.one(x)))
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())


def test_a_batch_of_another_size_may_be_on_the_cpu() -> None:
    x = torch.arange(24).reshape(12, 2) % 8
    with simulated():
        net = WithLoss().to("sim:0")
        program = ps.capture(net, (x.to("sim:0"),))
        for rows in (1, 3, 5, 2):
            program.trace_for([x[:rows]], training=False)
