"""Small models, each with one thing in it that pipelines get wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WIDTH = 6


def layers(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Zoo(nn.Module):
    """Base: three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a batch."""
        return (torch.randn(rows, WIDTH),), {}

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Skips(Zoo):
    """The first value is used by the last stage, and by the one in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layers[0](x).tanh()
        b = self.layers[1](a).tanh()
        c = self.layers[2](b + a)
        return c * a + x


class InPlace(Zoo):
    """Every other call changes its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x.relu_()
        x = self.layers[1](x)
        x.mul_(2).add_(1)
        x = self.layers[2](x)
        x[:, 0] = 0
        x[:, 1:3] += 1
        return F.relu(x, inplace=True)


class Views(Zoo):
    """A value, a view of it, and a change of the base in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.layers[0](x)
        view = base[:, :3]
        y = self.layers[1](x)
        base.add_(1)
        z = self.layers[2](y)
        return z + base + view.sum(1, keepdim=True)


class Tied(Zoo):
    """One weight read by two layers, in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x) @ self.layers[0].weight.T


class CalledTwice(Zoo):
    """A module that is called at both ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.chain(x))


class NormTwice(Zoo):
    """BatchNorm called at both ends: its statistics must be updated in order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x))
        x = self.layers[1](x).tanh()
        return self.norm(self.layers[2](x))


class NormByHand(Zoo):
    """`F.batch_norm` on buffers, whose change no version counter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = F.batch_norm(x, self.mean, self.var, training=self.training)
        x = self.layers[1](x).tanh()
        x = F.batch_norm(x, self.mean, self.var, training=self.training)
        return self.layers[2](x)


class BufferWritten(Zoo):
    """A running average that the forward itself keeps, and reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.5)
        x = self.layers[1](x).tanh()
        return self.layers[2](x - self.average)


class BufferReplaced(Zoo):
    """A running average that is assigned anew every time."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return x - self.average

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.norm(self.layers[1](self.layers[0](x))))


class Frozen(Zoo):
    """A BatchNorm that is in evaluation mode, and parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.norm.running_mean.fill_(0.25)
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.norm(self.layers[1](self.layers[0](x))))


class MasksFromNothing(Zoo):
    """Masks and positions made by factories, of fixed and of growing size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        order = torch.arange(rows, dtype=x.dtype).view(-1, 1)
        x = self.layers[0](x) + order
        mask = torch.ones(WIDTH, WIDTH).tril()
        if bool((mask.sum() > 3).item()):
            x = x @ mask
        x = self.layers[1](x) * torch.full((rows, 1), 0.5)
        return self.layers[2](torch.cat([x, x.new_zeros(rows, WIDTH)])[:rows])


class Heads(Zoo):
    """Reshapes as attention does: sizes that are products with the batch."""

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, 4, WIDTH),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.size()
        q, k, v = (
            layer(x).view(rows, length, 2, width // 2).transpose(1, 2) for layer in self.layers
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).reshape(rows * 2, length, length)
        mixed = scores.softmax(-1) @ v.reshape(rows * 2, length, -1)
        return mixed.view(rows, 2, length, -1).transpose(1, 2).contiguous().view(rows, length, -1)


class Attention(Zoo):
    """torch's own attention, which has kernels of its own when it is one call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    inputs = staticmethod(Heads.inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.layers[0](x))
        return self.layers[1](self.attention(x, x, x, need_weights=False)[0])


class Recurrent(Zoo):
    """An LSTM, which returns a nested tuple, transposed states among it."""

    inputs = staticmethod(Heads.inputs)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, (hidden, cell) = self.lstm(self.layers[0](x))
        return self.layers[1](output) + hidden.transpose(0, 1) * cell.transpose(0, 1)


class Normalised(Zoo):
    """A parametrised weight: computed anew at each use."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layers[0])
        parametrizations.weight_norm(self.layers[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)


class Experts(Zoo):
    """A closed block in the middle whose Python follows the values."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = layers(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                chosen = (x[:, 0] > 0) == bool(k)
                if chosen.any():
                    result[chosen] = expert(x[chosen])
            return result

    def __init__(self) -> None:
        super().__init__()
        self.router = self.Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.router(self.layers[1](self.layers[0](x))))


class StraightThrough(Zoo):
    """A custom autograd function whose derivative is not that of its operations."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3

    class Quantise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return StraightThrough.Round.apply(self.scale(x))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Quantise(), self.Quantise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.second(self.layers[1](self.first(self.layers[0](x)))))


class Detached(Zoo):
    """Branches without gradients, by `detach` and by `no_grad`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            target = self.layers[1](x)
        x = self.layers[1](x) - x.detach()
        return self.layers[2](x) * target


class HalfPrecision(Zoo):
    """Computes in bfloat16 in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.gelu(self.layers[1](x))
            with torch.autocast("cpu", enabled=False):
                z = self.layers[2](y.float())
            return (y @ self.layers[0].weight.T).float() + z


class Integers(Zoo):
    """Token ids, positions and boolean masks that cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, WIDTH), nn.Embedding(10, WIDTH)

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randint(10, (rows, 4)),), {"mask": torch.rand(rows, 4) > 0.5}

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layers[0](self.words(ids))
        x = x + self.places(ids.flip(1))
        x = self.layers[1](x).masked_fill(~mask[..., None], 0.0)
        return self.layers[2](x) + x.argmax(-1, keepdim=True)


class Parts(Zoo):
    """Operations that give several tensors, some of them not used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, _ = self.layers[0](x).chunk(3, dim=1)
        best, index = self.layers[1](x).max(dim=1, keepdim=True)
        x = torch.cat([a, b, best, index.to(best.dtype)], dim=1)
        first, *rest = x.unbind(1)
        return self.layers[2](x) + first[:, None] * torch.stack(rest, 1)[:, :1]


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None


@dataclass
class Bundle:
    point: Point
    extra: dict[str, Any]


class Structures(Zoo):
    """Named tuples, dataclasses, lists, dictionaries and `None`, in, between and out."""

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pair = [torch.randn(rows, WIDTH), {"deep": (torch.randn(rows, WIDTH), None)}]
        return (pair,), {"scale": 2, "name": "loud", "flags": (True, None)}

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, bundle: Bundle) -> Bundle:
            point = bundle.point
            return Bundle(Point(self.layer(point.x), point.y), {**bundle.extra, "half": point.x})

    def __init__(self) -> None:
        super().__init__()
        self.middle = self.Half()

    def forward(self, pair: list[Any], *, scale: int, name: str, flags: Any) -> Bundle:
        x = self.layers[0](pair[0]) * scale
        y = self.layers[1](pair[1]["deep"][0])
        bundle = self.middle(Bundle(Point(x, y), {"name": name}))
        x = self.layers[2](bundle.point.x) if flags[0] else x
        return Bundle(Point(x, None), {"list": [bundle.extra["half"], {"y": y}], "name": name})


class Returns(Zoo):
    """Gives back an input, a value twice, a parameter's product, a size and a constant."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        y = self.chain(x)
        return y, x, y, y.view(-1, 2, 3), x.shape[0] * 2, "constant", None


class Unused(Zoo):
    """An input, a parameter, a layer and a result that nobody uses."""

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, WIDTH), torch.randn(rows, 2)), {"nothing": None}

    def forward(self, x: torch.Tensor, y: torch.Tensor, nothing: None = None) -> torch.Tensor:
        self.layers[1](x)
        return self.layers[2](x)


class Strided(Zoo):
    """Values that are not contiguous, expanded, or channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(WIDTH, rows).T,), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        y = x[:, None, None, :].expand(-1, 1, WIDTH, -1).transpose(2, 3)
        y = self.conv(y.contiguous(memory_format=torch.channels_last))
        return self.layers[1](y.mean(1)).permute(0, 2, 1)[..., ::2]


class Doubles(Zoo):
    """Double precision and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.double()

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, WIDTH, dtype=torch.float64),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.layers[0](x))
        x = torch.fft.irfft(spectrum * spectrum.conj(), n=WIDTH)
        return self.layers[2](self.layers[1](x))


class OwnLoss(Zoo):
    """Makes its own loss when it is given labels, and stores what it saw."""

    @staticmethod
    def inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, WIDTH),), {"labels": torch.randint(WIDTH, (rows,))}

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.chain(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def outputs_loss(output: Any) -> torch.Tensor:
    """Depends on every floating point tensor that the model returns."""
    from penstock.planning.tuning import mean_square

    return mean_square(output)
