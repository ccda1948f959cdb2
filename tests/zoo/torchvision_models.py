"""torchvision: classification, segmentation, video."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

# Image sizes other than 64, and options that go with them.
_SIZES = {"inception_v3": 96, "googlenet": 96, "maxvit_t": 224}
_VIDEO = {"mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224), "s3d": (16, 64)}


def entries() -> list[Entry]:
    """All models that torchvision lists in these three modules."""
    tolerate_missing_torchvision_operators()
    from torchvision import models

    found = [_classifier(name) for name in models.list_models(module=models)]
    found += [_segmenter(name) for name in models.list_models(module=models.segmentation)]
    found += [_video(name) for name in models.list_models(module=models.video)]
    return found


def _classifier(name: str) -> Entry:
    size = _SIZES.get(name, 64)
    options = {"num_classes": 10}
    if name.startswith("vit"):
        size = 56 if name.endswith("14") else 64
        options["image_size"] = size
    return Entry(name, "torchvision", partial(_built, name, options), partial(_images, size))


def _segmenter(name: str) -> Entry:
    options = {"num_classes": 5, "weights_backbone": None, "aux_loss": "lraspp" not in name}
    if "lraspp" in name:
        del options["aux_loss"]
    return Entry(name, "torchvision", partial(_built, name, options), partial(_images, 64))


def _video(name: str) -> Entry:
    frames, size = _VIDEO.get(name, (8, 64))
    return Entry(
        name,
        "torchvision",
        partial(_built, name, {"num_classes": 10}),
        partial(_film, frames, size),
    )


def _built(name: str, options: dict[str, object]) -> nn.Module:
    from torchvision import models

    if name in ("inception_v3", "googlenet"):
        options = {**options, "init_weights": True}
    model: nn.Module = models.get_model(name, weights=None, **options)
    return model


def _images(size: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, size, size),), {}


def _film(frames: int, size: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, frames, size, size),), {}
