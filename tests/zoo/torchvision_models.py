"""torchvision: classification, segmentation, video.

Every model that it lists, on small images; the largest made shallower or narrower, as said here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

_SIZE = 64
_SIZES = {  # where 64 does not do
    "googlenet": 96,
    "inception_v3": 96,
    "vit_h_14": 56,
}
_LESS = 32  # for those that take long: tens of millions of parameters, or hundreds of modules
_SLOW = frozenset(
    """
    convnext_base convnext_large convnext_small densenet161 densenet201 efficientnet_b5
    efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m regnet_x_16gf regnet_x_32gf
    regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_32gf regnet_y_8gf resnet101 resnet152
    resnext101_32x8d resnext101_64x4d resnext50_32x4d swin_b swin_s swin_v2_b swin_v2_s vgg11
    vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn wide_resnet101_2 wide_resnet50_2
    """.split()
)
_FILM = (4, 32)  # frames and size
_FILMS = {"mvit_v1_b": (4, 64), "mvit_v2_s": (4, 64), "s3d": (16, 64)}

# A hundred million parameters and more: without most of their repeated blocks.
_HUGE = ("convnext_large", "efficientnet_v2_l", "regnet_x_32gf", "regnet_y_32gf",
         "wide_resnet101_2")  # fmt: skip
# What the makers of these models fix, and what their classes get here instead.
_CHANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "maxvit_t": ("maxvit", "MaxVit", {"input_size": (64, 64), "partition_size": 2}),
    **{
        name: ("vision_transformer", "VisionTransformer", {"num_layers": 3})
        for name in ("vit_h_14", "vit_l_16", "vit_l_32")
    },
    **{
        name: ("video.mvit", "MViT", {"spatial_size": (64, 64), "temporal_size": 4})
        for name in ("mvit_v1_b", "mvit_v2_s")
    },
}


def entries() -> list[Entry]:
    """All models that torchvision lists in these three modules."""
    tolerate_missing_torchvision_operators()
    from torchvision import models

    found = [_classifier(name) for name in models.list_models(module=models)]
    found += [_segmenter(name) for name in models.list_models(module=models.segmentation)]
    found += [_video(name) for name in models.list_models(module=models.video)]
    return found


def _classifier(name: str) -> Entry:
    size = _LESS if name in _SLOW else _SIZES.get(name, _SIZE)
    options: dict[str, Any] = {"num_classes": 10}
    if name.startswith("vit"):
        options["image_size"] = size
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # else it warns that theirs is slow
    if name == "inception_v3":
        options["aux_logits"] = False  # it would need 299 pixels
    return Entry(name, "torchvision", partial(_built, name, options), partial(_images, size))


def _segmenter(name: str) -> Entry:
    options: dict[str, Any] = {"num_classes": 5, "weights_backbone": None}
    if "lraspp" not in name:
        options["aux_loss"] = True
    return Entry(name, "torchvision", partial(_built, name, options), partial(_images, _LESS))


def _video(name: str) -> Entry:
    frames, size = _FILMS.get(name, _FILM)
    build = partial(_built, name, {"num_classes": 10})
    return Entry(name, "torchvision", build, partial(_film, frames, size))


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    from torchvision import models

    with _changed(*_CHANGED[name]) if name in _CHANGED else nullcontext():
        if name == "regnet_y_128gf":
            return _narrow_regnet(**options)
        model: nn.Module = models.get_model(name, weights=None, **options)
    if name in _HUGE:
        _make_shallow(model)
    if name.startswith("vgg"):
        _make_narrow(model)
    if name == "s3d":  # which wants 224 pixels, else
        model.avgpool = nn.AdaptiveAvgPool3d(1)
    return model


@contextmanager
def _changed(module: str, name: str, options: dict[str, Any]) -> Iterator[None]:
    """The maker of a model calls its class with these options instead of its own."""
    maker = importlib.import_module(f"torchvision.models.{module}")
    real = getattr(maker, name)
    with patch.object(maker, name, lambda **given: real(**{**given, **options})):
        yield


def _narrow_regnet(num_classes: int) -> nn.Module:
    """Regnet_y_128gf is 2904 and 7392 features wide; this one has as many blocks."""
    from torchvision.models.regnet import BlockParams, RegNet

    depths, widths = [2, 7, 17, 1], [48, 96, 192, 384]
    params = BlockParams(depths, widths, [24] * 4, [1.0] * 4, [2] * 4, se_ratio=0.25)
    model: nn.Module = RegNet(params, num_classes=num_classes)
    return model


def _make_shallow(model: nn.Module) -> None:
    """Leave out the blocks that follow one of the same kind and sizes."""
    for sequence in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        children = list(sequence.named_children())
        for (_, before), (name, block) in pairwise(children):
            if any(block.children()) and _sizes(block) == _sizes(before):
                del sequence._modules[name]


def _sizes(block: nn.Module) -> tuple[Any, ...]:
    return type(block), *((name, p.shape) for name, p in block.named_parameters())


def _make_narrow(model: nn.Module) -> None:
    """VGG's classifier, nine tenths of its parameters, with fewer hidden features."""
    first, _, last = (layer for layer in model.classifier if isinstance(layer, nn.Linear))
    model.classifier[0] = nn.Linear(first.in_features, 256)
    model.classifier[3] = nn.Linear(256, 256)
    model.classifier[6] = nn.Linear(256, last.out_features)


def _images(size: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, size, size),), {}


def _film(frames: int, size: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, frames, size, size),), {}
