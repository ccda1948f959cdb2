"""The models that are trained beside peers, each with a batch, a loss and cuts by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.bench.peers.workload import Build, Data, Loss, Workload
from penstock.loading import tolerate_missing_torchvision_operators

Stages = Callable[[], Sequence[nn.Module]]

# The schedules of torch.distributed.pipelining that are tried, by its names: with one stage in each
# process, or with two; and the numbers of micro-batches that all peers try: the powers of two
# that the planner looks at.
SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
HALVING = LOOPED[2:]  # these run the input half and the weight half of a backward apart
SCHEDULES = (*SINGLE, *LOOPED)
COUNTS = (1, 2, 4, 8, 16, 32, 64)

CLASSES = 1000
WORDS = 4096


@dataclass(frozen=True)
class Subject:
    """A model and how it is trained.

    Attributes:
        name: what it is called.
        build: makes the model, with the same weights every time.
        data: makes the batch and its target.
        loss: a mean over rows.
        by_hand: makes its two stages, cut where a user would cut.
        in_four: makes its four stages, for schedules of two stages per worker; `None` if it has too
            few layers.
        counts: of micro-batches that the peers try.
        schedules: of torch's pipelining that are tried.
    """

    name: str
    build: Build
    data: Data
    loss: Loss
    by_hand: Stages
    in_four: Stages | None
    counts: tuple[int, ...] = COUNTS
    schedules: tuple[str, ...] = SCHEDULES

    def workload(self, count: int) -> Workload:
        """One training step, in this number of micro-batches."""
        return Workload(self.build, self.data, self.loss, count)


def resnet50(seed: int = 0) -> nn.Module:
    """ResNet-50 in training mode, its parameters a function of `seed` alone."""
    tolerate_missing_torchvision_operators()
    from torchvision import models

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = models.resnet50(weights=None, num_classes=CLASSES)
    return model


def tutorial_cut() -> list[nn.Module]:
    """ResNet-50 in two stages, cut after `layer2` as PyTorch's tutorials do."""
    return _cut(resnet50(), after=["layer2"])


def quarter_cut() -> list[nn.Module]:
    """ResNet-50 in four stages, one `layer` in each: for two stages per process."""
    return _cut(resnet50(), after=["layer1", "layer2", "layer3"])


def _cut(model: nn.Module, after: Collection[str]) -> list[nn.Module]:
    """A ResNet cut after the named children; each stage maps one tensor to one tensor."""
    stages = [nn.Sequential()]
    for name, child in model.named_children():
        if name == "fc":
            stages[-1].add_module("flatten", nn.Flatten(1))
        stages[-1].add_module(name, child)
        if name in after:
            stages.append(nn.Sequential())
    return list(stages)


def images(rows: int, image: int) -> tuple[Tensor, Tensor]:
    """Images (rows, 3, image, image) and one-hot labels (rows, 1000), both float32."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, 3, image, image, generator=generator)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return found, F.one_hot(labels, CLASSES).float()


def labelled_images(rows: int, image: int) -> tuple[Tensor, Tensor]:
    """Images (rows, 3, image, image), float32, and their classes (rows,), int64."""
    found, labels = images(rows, image)
    return found, labels.argmax(1)


def resnet(rows: int, image: int, counts: Sequence[int] = COUNTS) -> Subject:
    """ResNet-50 on images of so many pixels in height and width, as in PyTorch's tutorials."""
    return Subject(
        f"ResNet-50, batch {rows}, {image}x{image}",
        resnet50,
        partial(images, rows, image),
        F.mse_loss,
        tutorial_cut,
        quarter_cut,
        tuple(counts),
    )


class Block(nn.Module):
    """A transformer block: attention and an MLP, each on normalised values."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Values (rows, length, width); the result has the same shape."""
        rows, length, width = x.shape
        split = self.attention(self.norm1(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Patches(nn.Module):
    """Patches of images and their positions, with a token for the class."""

    def __init__(self, image: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))

    def forward(self, images: Tensor) -> Tensor:
        """Images (rows, 3, image, image) as values (rows, 1 + patches, width)."""
        found = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(found), -1, -1)
        result: Tensor = torch.cat([token, found], 1) + self.positions
        return result


class FirstToken(nn.Module):
    """The values of the first token, which stands for the class."""

    def forward(self, values: Tensor) -> Tensor:
        """Values (rows, length, width) as (rows, width)."""
        return values[:, 0]


def vit(layers: int, width: int, heads: int, image: int) -> nn.Sequential:
    """A vision transformer with patches of 8x8."""
    torch.manual_seed(0)
    blocks = [Block(width, heads, causal=False) for _ in range(layers)]
    head = nn.Sequential(FirstToken(), nn.LayerNorm(width), nn.Linear(width, CLASSES))
    return nn.Sequential(Patches(image, 8, width), *blocks, head)


class Convolutions(nn.Sequential):
    """Two convolutions, each normalised in groups."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        )


class Down(nn.Module):
    """A level on the way down, which also returns its input, for the way up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool, self.convolutions = nn.MaxPool2d(2), Convolutions(inputs, outputs)

    def forward(self, x: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """`x` is (rows, inputs, height, width); the result is half as high and wide."""
        return self.convolutions(self.pool(x)), x, *kept


class Up(nn.Module):
    """A level on the way up, which takes what was kept last."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enlarged = nn.ConvTranspose2d(inputs, outputs, 2, 2)
        self.convolutions = Convolutions(2 * outputs, outputs)

    def forward(self, x: Tensor, skipped: Tensor, *kept: Tensor) -> Any:
        """`x` is (rows, inputs, height, width), `skipped` twice as high and wide."""
        found = self.convolutions(torch.cat([self.enlarged(x), skipped], 1))
        return (found, *kept) if kept else found


class Levels(nn.Sequential):
    """Modules one after the other, each of which gives what the next one takes."""

    def forward(self, *values: Tensor) -> Any:
        """The result of the last, which may be a tuple."""
        found: Any = values
        for level in self:
            found = level(*(found if isinstance(found, tuple) else (found,)))
        return found


def unet(channels: int) -> Levels:
    """A U-Net with four levels, from images to images, whose sides are multiples of eight."""
    c = channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Levels(
            *(Convolutions(3, c), Down(c, 2 * c), Down(2 * c, 4 * c), Down(4 * c, 8 * c)),
            *(Up(8 * c, 4 * c), Up(4 * c, 2 * c), Up(2 * c, c), nn.Conv2d(c, 3, 1)),
        )


def unet_cut(channels: int, count: int) -> list[nn.Module]:
    """The U-Net in `count` stages of equally many of its eight modules."""
    levels = list(unet(channels))
    size = len(levels) // count
    return [Levels(*levels[k : k + size]) for k in range(0, len(levels), size)]


def pictures(rows: int, image: int) -> tuple[Tensor, Tensor]:
    """Random images (rows, 3, image, image), and others of this shape as the target."""
    generator = torch.Generator().manual_seed(0)
    given, wanted = (torch.randn(rows, 3, image, image, generator=generator) for _ in range(2))
    return given, wanted


class Embedding(nn.Module):
    """Words and their positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (rows, length) as values (rows, length, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.words(tokens) + self.positions(positions)
        return result


def gpt2_like(layers: int, width: int, heads: int, length: int) -> nn.Sequential:
    """A model like GPT-2: an embedding, blocks, a head with weights of its own."""
    torch.manual_seed(0)
    blocks = [Block(width, heads) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False))
    return nn.Sequential(Embedding(length, width), *blocks, head)


def gpt2(layers: int, width: int, vocabulary: int, positions: int) -> nn.Module:
    """A GPT-2 of `transformers` with random weights; its heads are 64 wide, but at least four."""
    tolerate_missing_torchvision_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(4, width // 64),
        vocab_size=vocabulary,
        n_positions=positions,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


class Logits(nn.Module):
    """A language model of `transformers` whose result is the logits alone, without dropout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (rows, length) as logits (rows, length, words)."""
        result: Tensor = self.model(input_ids=tokens).logits
        return result


def gpt2_logits(layers: int, width: int, length: int) -> nn.Module:
    """A GPT-2 of `transformers` that has no dropout, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Logits(gpt2(layers, width, WORDS, length))


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens (rows, length), int64, and the tokens that follow them, of this shape."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(WORDS, (rows, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def language_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of logits (rows, length, words) and tokens (rows, length)."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def classifier(inputs: int, width: int) -> nn.Sequential:
    """Three linear layers, to as many classes as ResNet-50 has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )


def labelled(inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    """Normal numbers (rows, inputs), and a class for each row."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, inputs, generator=generator)
    return found, torch.randint(CLASSES, (rows,), generator=generator)


def square_mlp(layers: int, width: int) -> nn.Sequential:
    """So many linear layers of one width, with ReLUs between them; the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*parts[:-1])


def wide_mlp(ends: int, width: int) -> nn.Sequential:
    """An MLP whose hidden layer is much wider than its ends, so that cuts move much data."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ends, width), nn.ReLU(), nn.Linear(width, ends))


def tiny_calls(layers: int, width: int) -> nn.Sequential:
    """Many calls that take microseconds."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))
    )


def numbers(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """A batch and a target of normally distributed numbers, both (rows, width)."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, width, generator=generator) for _ in range(2))  # type: ignore


def even(build: Callable[[], nn.Sequential], count: int) -> list[nn.Module]:
    """The layers of a sequence in `count` parts of about equally many."""
    layers = list(build())
    edges = [round(k * len(layers) / count) for k in range(count + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(edges)]


def _sequence(
    name: str,
    build: Callable[[], nn.Sequential],
    data: Data,
    loss: Loss,
    counts: tuple[int, ...],
) -> Subject:
    in_four = partial(even, build, 4) if len(build()) > 3 else None
    return Subject(name, build, data, loss, partial(even, build, 2), in_four, counts)


def subjects(quick: bool) -> dict[str, Subject]:
    """The six models, by a short name; with `quick` so small that a step takes milliseconds."""
    rows, image = (8, 32) if quick else (32, 64)
    channels, side = (8, 16) if quick else (16, 64)

    def counts(rows: int) -> tuple[int, ...]:
        return tuple(count for count in (COUNTS[:2] if quick else COUNTS) if rows % count == 0)

    layers, width, length, texts = (4, 32, 16, 8) if quick else (12, 384, 256, 8)
    gpt = partial(gpt2_like, layers, width, 2 if quick else 6, length)
    # With four micro-batches a boundary is 16 MiB: 65,536 rows of 64 numbers.
    many = 4 * (256 if quick else 65536)
    mlp = partial(wide_mlp, 4, 64)
    tiny = partial(tiny_calls, 20 if quick else 200, 16)
    found = {
        "resnet": resnet(rows, image, counts(rows)),
        "vit": _sequence(
            f"{layers} layers like ViT, width {width}, {rows} images of {side}x{side}",
            partial(vit, layers, width, 2 if quick else 6, side),
            partial(labelled_images, rows, side),
            F.cross_entropy,
            counts(rows),
        ),
        "unet": Subject(
            f"U-Net of {channels} to {8 * channels} channels, {rows} images of {side}x{side}",
            partial(unet, channels),
            partial(pictures, rows, side),
            F.mse_loss,
            partial(unet_cut, channels, 2),
            partial(unet_cut, channels, 4),
            counts(rows),
        ),
        "gpt": _sequence(
            f"{layers} layers like GPT-2, width {width}, {texts} rows of {length} tokens",
            gpt,
            partial(tokens, texts, length),
            language_loss,
            counts(texts),
        ),
        "wide": _sequence(
            f"MLP 4-64-4, {many} rows: boundaries of {many * 64 / 2**20:.1f} MiB at m=4",
            mlp,
            partial(numbers, many, 4),
            F.mse_loss,
            counts(many),
        ),
        "tiny": _sequence(
            f"{len(tiny())} tiny calls, 32 rows of 16",
            tiny,
            partial(numbers, 32, 16),
            F.mse_loss,
            counts(32),
        ),
    }
    if quick:
        return {key: replace(each, schedules=("1F1B",)) for key, each in found.items()}
    return found
