"""More awkward models: values of every kind that cross a cut, and tensors kept in odd places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.awkward import WIDTH, Zoo


class LowPrecision(Zoo):
    """bfloat16 and float64 activations, converted at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.low(self.layers[0](x).bfloat16())
        low = F.gelu(x)
        x = self.layers[1](x.float()).double()
        return self.layers[2]((x * 2).float()) + low.float()


class ComplexNumbers(Zoo):
    """A spectrum that is used before and after other layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(self.layers[0](x))
        y = self.layers[1](spectrum.abs())
        turned = spectrum * torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / 7)
        return self.layers[2](y) + torch.fft.ifft(turned).real + torch.view_as_real(spectrum).sum(2)


class Expanded(Zoo):
    """Expanded, transposed and overlapping views cross the cuts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.layers[0](x).mean(1, keepdim=True).expand(-1, WIDTH)
        x = self.layers[1](x)
        pairs = x.unsqueeze(2) * mean.unsqueeze(1)
        turned = pairs.transpose(1, 2)
        windows = F.pad(x, (0, 2)).unfold(1, 3, 1)
        x = self.layers[2](x + mean)
        return turned.sum(1) + windows.amax(2) + x


class Empty(Zoo):
    """Tensors without elements, and a scalar, cross the cuts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        nothing = x[:, WIDTH:]
        none_either = x.new_zeros(0, 3)
        scale = x.detach().abs().max()
        x = self.layers[1](x).tanh()
        y = torch.cat([self.layers[2](x), nothing], 1)
        return y * (1 + scale.clamp(max=0)) + none_either.sum()


class LateInputs(Zoo):
    """Inputs of several kinds that only the end of the model uses."""

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        late = {"weights": torch.rand(rows), "labels": torch.randint(WIDTH, (rows,))}
        return (torch.randn(rows, WIDTH),), {"late": late, "keep": torch.rand(rows, WIDTH) > 0.2}

    def forward(
        self, x: torch.Tensor, late: dict[str, torch.Tensor], keep: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.chain(x) * keep
        loss = F.cross_entropy(x, late["labels"], reduction="none")
        return {"logits": x, "loss": loss * late["weights"]}


@dataclass
class State:
    """What the layers pass on."""

    hidden: torch.Tensor
    history: tuple[torch.Tensor, ...]
    notes: dict[str, Any]
    nothing: None = None


class Carried(Zoo):
    """A dataclass with a growing tuple, plain data and `None` goes from layer to layer."""

    def forward(self, x: torch.Tensor) -> State:
        state = State(x, (), OrderedDict(step=0))
        for k, layer in enumerate(self.layers):
            hidden = layer(state.hidden).relu()
            notes = OrderedDict(state.notes, step=k + 1, mean=hidden.mean(1))
            state = State(hidden, (*state.history, hidden), notes)
        return State(sum(state.history, state.hidden), state.history[-1:], state.notes)


class ChangedLater(Zoo):
    """A value with several users, changed in place after some of them, also through slices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        kept = x * 2
        y = self.layers[1](x).sigmoid()
        kept[:, :2] = 0
        kept.mul_(y)
        z = self.layers[2](y)
        kept += z
        return kept + y


class HeldTensors(Zoo):
    """Tensors in lists, tuples and dictionaries of the module, and of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = [torch.randn(WIDTH), torch.randn(WIDTH)]
        self.tables = {"scale": torch.rand(WIDTH), "cpu": torch.randn(WIDTH)}
        self.pair = (torch.randn(WIDTH), 3)
        self.layers.scales = [torch.rand(1) for _ in range(3)]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.layers.scales, strict=True):  # type: ignore[arg-type]
            x = layer(x).tanh() * scale
        x = x * self.tables["scale"] + self.tables["cpu"]
        return x + self.anchors[0] * self.anchors[1] + self.pair[0] * self.pair[1]


ZOO: list[Callable[[], Zoo]] = sorted(Zoo.__subclasses__(), key=lambda kind: kind.__name__)
"""All awkward models."""
