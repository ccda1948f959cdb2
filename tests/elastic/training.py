"""What the elastic runs train, and how it ends on one device that nobody disturbs.

The batch of a step is a function of the step's number alone. So whoever trains the steps 0 to n,
once each and in order, ends with the same bits, whatever has happened in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from penstock.bench.subjects import Block, language_loss
from penstock.oracle import Oracle

ROWS, MICROBATCHES = 8, 4
STEPS = 200
RATE = 1e-3
WORDS, LENGTH, WIDTH = 64, 16, 32
CLASSES, SIDE = 10, 12


class Embedding(nn.Module):
    """Words and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (rows, length) as values (rows, length, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.words(tokens) + self.positions(positions)
        return result


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Images (rows, channels, height, width), as many and as large as before."""
        found = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(found)))


def _gpt() -> nn.Module:
    blocks = [Block(WIDTH, heads=2) for _ in range(4)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    return nn.Sequential(Embedding(), *blocks, head)


def _resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return nn.Sequential(stem, *(Residual(8) for _ in range(4)), head)


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(CLASSES, (ROWS,), generator=generator)


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss.

    Attributes:
        build: the model, with weights of torch's own generator.
        draw: a batch and its target, of `ROWS` rows.
        loss: of an output and a target, a mean over rows.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Module:
        """A fresh model, the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.build()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch and the target of a step."""
        return self.draw(torch.Generator().manual_seed(1000 + step))


TASKS = {
    "gpt": Task(_gpt, _text, language_loss),
    "resnet": Task(_resnet, _images, F.cross_entropy),
}


class Data(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a run, for `DataLoader(Data(...), batch_size=None)`.

    Args:
        task: whose.
        steps: how many there are.
    """

    def __init__(self, task: Task, steps: int) -> None:
        self._task, self._steps = task, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self._task.batch(step)


def reference(model_name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The state dict after so many steps in plain PyTorch: one device, one intra-op thread."""
    task, before = TASKS[model_name], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = task.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for step in range(steps):
            x, target = task.batch(step)
            Oracle(model, (x,), {}, MICROBATCHES).train_step(step, task.loss, target)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()
    finally:
        torch.set_num_threads(before)
