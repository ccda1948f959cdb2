"""The models that the tests train, small, each with a batch, a target and a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.uniform import replicated, uniform_plan
from penstock.capture import Key
from penstock.capture.replay import seeded
from penstock.schedule import SCHEDULES

__all__ = ["replicated", "uniform_plan"]  # and what is defined here

ROWS = 11  # divides by no number of micro-batches that is tested


@dataclass(frozen=True)
class Case:
    """A model with everything that a training step needs."""

    name: str
    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_fn: Callable[..., torch.Tensor]

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        """A fresh model, the same every time."""
        torch.manual_seed(1)
        return self.build()


class UNet(nn.Module):
    """Skips over several stages, BatchNorm, and activations in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = self._block(3, width)
        self.down2 = self._block(width, width)
        self.middle = self._block(width, width)
        self.up2 = self._block(2 * width, width)
        self.up1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width + 3, 1, 1)

    def _block(self, inside: int, outside: int) -> nn.Module:
        conv = nn.Conv2d(inside, outside, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.head(torch.cat([a, x], 1))


class Named(nn.Module):
    """Keyword arguments, an integer input, a mask for a late stage, a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)

    def forward(
        self, tokens: torch.Tensor, *, mask: torch.Tensor, gain: float = 1.0
    ) -> dict[str, Any]:
        hidden = self.first(self.embedding(tokens)).tanh()
        hidden = self.drop(hidden * self.scale)
        logits = self.second(hidden) * mask[..., None] * gain
        return {"logits": logits, "extras": {"hidden": hidden, "width": 8}}


def resnet50() -> nn.Module:
    """ResNet-50 with ten classes."""
    from torchvision import models

    return models.resnet50(num_classes=10)


def vision_transformer() -> nn.Module:
    """A ViT of two blocks."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=16,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout=0.1,
        num_classes=10,
    )


def gpt2(layers: int = 2) -> nn.Module:
    """GPT-2 with dropout and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU in place between them."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def language_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every position."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def named_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    """Uses both tensors of the dictionary."""
    return F.mse_loss(output["logits"], target) + output["extras"]["hidden"].square().mean()


@functools.cache
def cases() -> dict[str, Case]:
    """The five models of the exactness tests, by name."""
    torch.manual_seed(2)
    images, labels = torch.randn(ROWS, 3, 16, 16), torch.randint(10, (ROWS,))
    large = torch.randn(ROWS, 3, 48, 48)  # 2x2 are left for the last BatchNorm, which refuses 1
    tokens = torch.randint(64, (ROWS, 16))
    words, mask = torch.randint(16, (ROWS, 6)), (torch.rand(ROWS, 6) > 0.3).float()
    found = [
        Case("resnet50", resnet50, (large,), {}, labels, F.cross_entropy),
        Case("vit", vision_transformer, (images,), {}, labels, F.cross_entropy),
        Case("gpt2", gpt2, (), {"input_ids": tokens}, tokens.roll(-1, 1), language_loss),
        Case("unet", UNet, (images,), {}, torch.randn(ROWS, 1, 16, 16), F.mse_loss),
        Case(
            "named",
            Named,
            (words,),
            {"mask": mask, "gain": 0.5},
            torch.randn(ROWS, 6, 8),
            named_loss,
        ),
    ]
    return {case.name: case for case in found}


@functools.cache
def costs(name: str) -> ps.Profile:
    """The case's profile, measured once, and not for long: no result depends on it."""
    case = cases()[name]
    program = ps.capture(case.model(), case.args, case.kwargs)
    return ps.profile(program, devices=["cpu"], seconds=1)


def planned(
    name: str, workers: int, microbatches: int, schedule: str = "auto", recompute: str = "auto"
) -> ps.Plan:
    """A plan for the case on CPU workers."""
    profile = msgspec.structs.replace(costs(name), devices=("cpu",) * workers)
    return ps.plan(
        profile, num_microbatches=microbatches, schedule=schedule, recompute=recompute, replicas=1
    )


def workers_for(schedule: str, stages: int) -> int | None:
    """On how many workers a schedule runs so many stages: a core each, two stages if it can."""
    takes = SCHEDULES[schedule].takes
    return next((w for w in (stages // 2, stages) if w > 1 and takes(stages, w)), None)


def pipeline(case: Case, plan: ps.Plan, **options: Any) -> ps.Pipeline:
    """A pipeline over a fresh model of the case."""
    devices = plan.devices
    return ps.Pipeline(case.model(), case.args, case.kwargs, devices=devices, plan=plan, **options)


def own_forward(
    program: ps.Program, args: Any, kwargs: Any, key: Key, model: nn.Module | None = None
) -> Any:
    """The model's own forward, with the random numbers of a replay with this key."""
    with seeded(program, key, model):
        return (model or program.model)(*args, **kwargs)


class Remembers(nn.Module):
    """What it gives depends on what it has seen before, as code books and spectral norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return x - self.mean


class AddsItself(torch.autograd.Function):
    """Its backward is one of its own, as those of reversible networks are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            torch.autograd.backward((x.detach() * weight,), (gradient,))
        return gradient * weight, None
