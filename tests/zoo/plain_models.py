"""Plain PyTorch: what people write themselves, one awkward thing in each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.special_models import (
    WIDTH,
    Attributes,
    ByShape,
    ByValue,
    Checkpointed,
    Closed,
    Compiled,
    Doubled,
    Hooked,
    Methods,
    Normed,
    Operators,
    Scripted,
    Stored,
    TwoPaths,
    lazy,
)

LENGTH, WORDS = 6, 30


def entries() -> list[Entry]:
    """All of them, the awkward ones of the tests included."""
    from tests.zoo.crossing import ZOO

    found = [Entry(name, "plain", build, inputs, rows=4) for name, build, inputs in _MODELS]
    names = {entry.name for entry in found}
    awkward = [z for z in ZOO if z.__name__ not in names]
    return found + [Entry(z.__name__, "plain", z, z.inputs, rows=4) for z in awkward]


# -- inputs -----------------------------------------------------------------------------------


def vectors(rows: int) -> Inputs:
    return (torch.randn(rows, WIDTH),), {}


def sequences(rows: int) -> Inputs:
    return (torch.randn(rows, LENGTH, WIDTH),), {}


def images(rows: int) -> Inputs:
    return (torch.randn(rows, 3, 16, 16),), {}


# -- sequences --------------------------------------------------------------------------------


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    @staticmethod
    def inputs(rows: int) -> Inputs:
        ids = torch.randint(WORDS, (rows, LENGTH))
        padding = torch.zeros(rows, LENGTH, dtype=torch.bool)
        padding[:, -1] = True
        return (ids, ids.flip(1)), {"padding": padding}

    def forward(self, a: torch.Tensor, b: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(b.shape[1]).isinf()
        y = self.transformer(
            self.words(a),
            self.words(b),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(y)


class Recurrent(nn.Module):
    """A packed sequence through an LSTM and a GRU, inside a module of its own."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = rnn.pack_padded_sequence(
                x, lengths.tolist(), batch_first=True, enforce_sorted=False
            )
            y, _ = rnn.pad_packed_sequence(
                self.lstm(packed)[0], batch_first=True, total_length=LENGTH
            )
            return self.gru(y)[0]

    def __init__(self) -> None:
        super().__init__()
        self.words, self.packed = nn.Embedding(WORDS, WIDTH), self.Packed()
        self.head = nn.Linear(2 * WIDTH, 3)

    @staticmethod
    def inputs(rows: int) -> Inputs:
        lengths = torch.randint(1, LENGTH + 1, (rows,))
        return (torch.randint(WORDS, (rows, LENGTH)), lengths), {}

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.head(self.packed(self.words(ids), lengths))


class Experts(nn.Module):
    """Tokens go to the experts that their values choose."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2)
            result = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                token, place = torch.where(chosen == k)
                if len(token):
                    result.index_add_(0, token, expert(x[token]) * weights[token, place, None])
            return result

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixture, self.after = (
            nn.Linear(WIDTH, WIDTH),
            self.Mixture(),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.after(x + self.mixture(x))


# -- images -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions, told what time it is if there is a time."""

    def __init__(self, before: int, after: int, time: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norm = nn.GroupNorm(2, after)
        self.time = nn.Linear(time, after) if time else None

    def forward(self, x: torch.Tensor, t: torch.Tensor | None = None) -> torch.Tensor:
        x = F.silu(self.norm(self.first(x)))
        if self.time is not None and t is not None:
            x = x + self.time(t)[:, :, None, None]
        return F.silu(self.second(x))


class Diffusion(nn.Module):
    """A U-Net with time embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(3, 8, WIDTH), Block(8, 16, WIDTH)])
        self.middle = Block(16, 16, WIDTH)
        self.up = nn.ModuleList([Block(32, 8, WIDTH), Block(16, 8, WIDTH)])
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Conv2d(8, 3, 1)

    @staticmethod
    def inputs(rows: int) -> Inputs:
        return (torch.randn(rows, 3, 16, 16), torch.randint(1000, (rows,))), {}

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(WIDTH // 2) * (9.0 / (WIDTH // 2)))
        angles = steps[:, None].float() * rates[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        skips = []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, t)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), t)
        return self.head(x)


class UNet(Diffusion):
    """Without time."""

    inputs = staticmethod(images)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, torch.zeros(len(x)))


class Depth(nn.Module):
    """Stochastic depth, and an auxiliary head in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.norm, self.head, self.extra = nn.BatchNorm2d(8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.stem(x))
        for k, block in enumerate(self.blocks):
            y = block(x)
            if self.training and k:
                y = y * (torch.rand(len(x), 1, 1, 1) < 0.8)
            x = x + y
            if k == 1:
                aside = self.extra(x.mean((2, 3)))
        out = self.head(x.mean((2, 3)))
        return (out, aside) if self.training else out


class Pair(nn.Module):
    """A generator and a discriminator that sees its images and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(True), nn.Unflatten(1, (4, 4, 4)),
            nn.ConvTranspose2d(4, 3, 4, 4), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 4, 4, 4), nn.LeakyReLU(0.2, True), nn.Dropout2d(0.3),
            nn.Flatten(), nn.Linear(64, 1),
        )  # fmt: skip

    @staticmethod
    def inputs(rows: int) -> Inputs:
        return (torch.randn(rows, WIDTH), torch.randn(rows, 3, 16, 16)), {}

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.generator(noise)
        return {"made": self.discriminator(made), "real": self.discriminator(real)}


# -- graphs, tables, pairs ----------------------------------------------------------------------


class Graph(nn.Module):
    """Messages along a dense adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @staticmethod
    def inputs(rows: int) -> Inputs:
        return (torch.randn(rows, 5, WIDTH), (torch.rand(rows, 5, 5) > 0.5).float()), {}

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degree = edges.sum(-1, keepdim=True).clamp_min(1)
        for layer in self.layers:
            x = F.relu(layer(torch.einsum("bij,bjc->bic", edges, x) / degree)) + x
        return x.mean(1)


class Recommender(nn.Module):
    """Several embedding tables, a bag of features, integers all over."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({n: nn.Embedding(20, 8) for n in ("user", "item", "place")})
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")
        self.deep = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    @staticmethod
    def inputs(rows: int) -> Inputs:
        ids = {name: torch.randint(20, (rows,)) for name in ("user", "item", "place")}
        return (), {"ids": ids, "history": torch.randint(20, (rows, 5))}

    def forward(self, ids: dict[str, torch.Tensor], history: torch.Tensor) -> torch.Tensor:
        found = [table(ids[name]) for name, table in self.tables.items()]
        found.append(self.bag(history))
        return self.deep(torch.cat(found, 1)).squeeze(1) + (found[0] * found[1]).sum(1)


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.second(self.first(x).relu())
        return F.linear(
            F.linear(code, self.second.weight.T).relu(), self.first.weight.T, self.shift
        )


class Siamese(nn.Module):
    """One encoder, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )

    @staticmethod
    def inputs(rows: int) -> Inputs:
        return (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)), {}

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(self.encoder(a), self.encoder(b))


_Build = Callable[[], nn.Module]
_MODELS: list[tuple[str, _Build, Callable[[int], Inputs]]] = [
    *((kind.__name__, kind, kind.inputs)
      for kind in (Translator, Recurrent, Diffusion, UNet, Pair, Graph, Recommender, Siamese)),
    *((kind.__name__, kind, vectors)
      for kind in (Experts, TiedAutoencoder, Checkpointed, Hooked, Scripted, Compiled, Normed,
                   ByShape, ByValue, Attributes, TwoPaths, Methods, Operators,
                   Stored, Doubled, Closed)),
    ("Depth", Depth, images),
    ("Lazy", lazy, vectors),
    ("Loops", partial(ByShape, 5), sequences),
]  # fmt: skip
