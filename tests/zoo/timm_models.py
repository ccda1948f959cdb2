"""timm: one small model of every family, that is of every module of `timm.models`."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

_SMALL = ("test", "zepto", "femto", "atto", "pico", "nano", "xxs", "xxt", "tiny", "_t", "mini",
          "xs", "small", "_s", "b0", "18", "0")  # fmt: skip


def entries() -> list[Entry]:
    """The first of each module's models whose name sounds smallest."""
    tolerate_missing_torchvision_operators()
    import timm

    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            name = min(names, key=_rank)
            found.append(Entry(name, "timm", partial(_built, name), partial(_images, name)))
    return found


def _rank(name: str) -> tuple[int, int]:
    return next((k for k, word in enumerate(_SMALL) if word in name), len(_SMALL)), len(name)


def _built(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10)
    return model


def _images(name: str, rows: int) -> Inputs:
    import timm

    size = timm.get_pretrained_cfg(name)
    shape = size.input_size if size is not None else (3, 224, 224)
    return (torch.randn(rows, *shape),), {}
