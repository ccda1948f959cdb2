"""How long capturing takes, and how much memory, beside a plain forward and backward.

    python -m penstock.bench capture_time [--rounds 3] [--only WORD] [--json FILE] [--record]

The models are transformers of several depths, convolutions in two and three dimensions, a long
sequence, and MONAI's SwinUNETR where it is installed. Captures are timed in one process, after a
first one that does not count because it imports much; `--rounds 0` skips the timing.

Memory is measured in a new process for each figure, beyond that of the model and the example: the
peak bytes of tensors, which are the same on every machine, and the peak growth of the resident
memory of the process. It is measured for a capture and, for comparison, for a forward and backward
in plain PyTorch of the example and of its first row, with the gradients of all parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench import record
from penstock.bench.footprint import SETTINGS, Live, forget_peak, resident
from penstock.bench.subjects import gpt2, resnet50
from penstock.bench.turns import Contestant, take_turns, timed
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.torch_internals import pytree

Case = tuple[nn.Module, dict[str, Any]]
"""A model, and the example as `capture` takes it."""

DEPTHS = (4, 12, 24, 48)
WAYS = ("capture", "step", "row")
UNET = "3-D U-Net, 4 volumes of 32³"


class Block(nn.Module):
    """Two 3-D convolutions with a shortcut; the result is multiplied by its own sigmoid."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.one = nn.Conv3d(inside, outside, 3, padding=1)
        self.norm = nn.InstanceNorm3d(outside)
        self.two = nn.Conv3d(outside, outside, 3, padding=1)
        self.skip = nn.Conv3d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Volumes (rows, inside, depth, height, width) as (rows, outside, depth, height, width)."""
        h = F.gelu(self.norm(self.one(x)))
        h = F.gelu(self.two(h) + self.skip(x))
        return h * torch.sigmoid(h)


class UNet(nn.Module):
    """A 3-D U-Net of three levels."""

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


def language(layers: int, width: int, vocabulary: int, length: int) -> Case:
    """A GPT-2 and tokens for each of four rows."""
    tokens = torch.randint(0, vocabulary, (4, length))
    return gpt2(layers, width, vocabulary, 2 * length), {"kwargs": {"input_ids": tokens}}


def pictures() -> Case:
    """ResNet-50 and four images of 128x128."""
    return resnet50(), {"args": (torch.randn(4, 3, 128, 128),)}


def encoder() -> Case:
    """A transformer encoder of torch.nn, and four sequences of 512."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 6), {"args": (torch.randn(4, 512, 256),)}


def unet() -> Case:
    """A 3-D U-Net and four volumes."""
    return UNet(), {"args": (torch.randn(4, 1, 32, 32, 32),)}


def swin_unetr() -> Case:
    """SwinUNETR and two volumes."""
    from monai.networks.nets import SwinUNETR

    model: nn.Module = SwinUNETR(in_channels=1, out_channels=2, feature_size=12)
    return model, {"args": (torch.randn(2, 1, 64, 64, 64),)}


def cases() -> dict[str, Callable[[], Case]]:
    """Functions that build each model and its example, by name."""
    found: dict[str, Callable[[], Case]] = {
        f"narrow GPT-2, {layers} layers": partial(language, layers, 64, 256, 32)
        for layers in DEPTHS
    }
    found["GPT-2, 4 rows of 128 tokens"] = partial(language, 12, 768, 50257, 128)
    found["ResNet-50, 4 images of 128²"] = pictures
    found["Transformer encoder, 4 rows of 512"] = encoder
    found[UNET] = unet
    if importlib.util.find_spec("monai") is not None:
        found["SwinUNETR, 2 volumes of 64³"] = swin_unetr
    return found


def seconds_of(built: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Capture the models in turns; the seconds of every round, by the name of the model."""
    ps.capture(nn.Linear(2, 2), (torch.ones(2, 2),))

    def captured(model: nn.Module, given: dict[str, Any]) -> None:
        program = ps.capture(model, **given)
        program.cuts.reasons  # noqa: B018 - where it can be cut is part of it

    contestants = [
        Contestant(name, timed(partial(captured, *case))) for name, case in built.items()
    ]
    return dict(zip(built, take_turns(contestants, rounds), strict=True))


def held(name: str, way: str, frozen: bool = False) -> dict[str, int]:
    """Measure the memory of a capture or of a step, in a process of its own.

    Args:
        name: the name of the case.
        way: one of `WAYS`: a capture, a step of the example, or a step of its first row.
        frozen: whether the inputs require gradients instead of the parameters.

    Returns:
        `live`, the peak bytes of tensors; `resident`, the peak growth of the process in bytes; and
        for a capture `calls`, the number of calls of the program.
    """
    given = ("--only", name, "--hold", way, *(["--frozen"] if frozen else []))
    found: dict[str, int] = record.in_own_process(
        "penstock.bench", "capture_time", *given, **SETTINGS
    )
    return found


def hold(case: Case, way: str, frozen: bool) -> dict[str, int]:
    """Measure as `held` does, in this process, which has done nothing else before."""
    torch.set_num_threads(1)
    model, given = case
    if frozen:
        model.requires_grad_(False)
        for leaf in pytree.tree_leaves(given):
            leaf.requires_grad_()
    step(*_small())
    ps.capture(_small()[0], **_small()[1])  # so that late imports do not count
    found: dict[str, int] = {}
    if way == "row":
        given = pytree.tree_map(lambda leaf: leaf[:1].clone(), given)
    known = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(given))
    forget_peak()
    before = resident()
    with Live(known) as live:
        if way == "capture":
            found["calls"] = len(ps.capture(model, **given))
        else:
            step(model, given)
    return {**found, "live": live.peak, "resident": resident("VmHWM") - before}


def _small() -> Case:
    return nn.Linear(2, 2), {"args": (torch.ones(2, 2),)}


def step(model: nn.Module, given: dict[str, Any]) -> None:
    """A forward and a backward in plain PyTorch."""
    result = model(*given.get("args", ()), **given.get("kwargs", {}))
    result = result if isinstance(result, torch.Tensor) else result[0]
    result.square().mean().backward()


def described(row: dict[str, Any]) -> str:
    """A model's figures in a line."""
    capture, one = row["capture"], row["row"]
    text = f"{row['model']}: {capture['calls']} calls"
    if row["seconds"]:
        median, low, high = (f(row["seconds"]) for f in (statistics.median, min, max))
        text += f", {median:.2f} s ({low:.2f} to {high:.2f})"
    for what in ("live", "resident"):
        sizes = " / ".join(f"{row[way][what] / 2**20:.0f}" for way in WAYS)
        text += f"; {what} {sizes} MiB ({capture[what] / one[what]:.2f} of a row's step)"
    return text


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("capture_time", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of timed captures")
    parser.add_argument("--only", default="", help="only the models whose names contain this")
    parser.add_argument("--hold", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "only")
    tolerate_missing_torchvision_operators()
    chosen = {name: build for name, build in cases().items() if options.only in name}
    if options.hold:
        (build,) = chosen.values()
        torch.manual_seed(0)
        print(json.dumps(hold(build(), options.hold, options.frozen)))
        return 0
    built = {name: build() for name, build in chosen.items()} if options.rounds else {}
    seconds = seconds_of(built, options.rounds)
    rows = []
    for name in chosen:
        row: dict[str, Any] = {"model": name, "seconds": seconds.get(name, [])}
        row |= {way: held(name, way) for way in WAYS}
        rows.append(row)
        print(described(row), flush=True)
    record.save("capture_time", {"rows": rows}, options)
    return 0
