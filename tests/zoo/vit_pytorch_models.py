"""vit-pytorch: variants of vision transformers, two blocks deep."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import images, numbers, table

_WHOLE = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32}
_USUAL = {**_WHOLE, "depth": 2, "heads": 2, "mlp_dim": 64}
_PLAIN = (
    *("vit.ViT", "simple_vit.SimpleViT", "deepvit.DeepViT", "parallel_vit.ViT"),
    *("vit_for_small_dataset.ViT", "simple_vit_with_patch_dropout.SimpleViT"),
    *("simple_vit_with_qk_norm.SimpleViT", "simple_vit_with_register_tokens.SimpleViT"),
    *("simple_vit_with_fft.SimpleViT", "learnable_memory_vit.ViT", "vit_with_patch_dropout.ViT"),
    *("simple_vit_with_value_residual.SimpleViT", "simple_uvit.SimpleUViT"),
    *("xcit.XCiT", "vit_with_decorr.ViT"),
    *("jumbo_vit.JumboViT", "rvt.RvT"),
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
    "xcit.XCiT": {"cls_depth": 1},
    "cait.CaiT": {**_USUAL, "cls_depth": 1},
    "parallel_vit.ViT": {"num_parallel_branches": 2},
    "jumbo_vit.JumboViT": {"num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2},
}
_OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "cait.CaiT": ({**_USUAL, "cls_depth": 1}, images()),
    "t2t.T2TViT": (
        {"dim": 32, "image_size": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "num_classes": 10},
        images(),
    ),
    "levit.LeViT": (
        {
            "image_size": 64,
            "num_classes": 10,
            "stages": 2,
            "dim": (16, 32),
            "depth": 1,
            "heads": (2, 4),
            "mlp_mult": 2,
        },
        images(64),
    ),
    "cvt.CvT": ({"num_classes": 10}, images(64)),
    "regionvit.RegionViT": (
        {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "num_classes": 10, "window_size": 2},
        images(64),
    ),
    "scalable_vit.ScalableViT": (
        {
            "num_classes": 10,
            "dim": 16,
            "heads": (1, 1, 2, 2),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (2, 2, 1, 1),
            "window_size": (4, 2, None, None),
        },
        images(64),
    ),
    "nest.NesT": (
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": 10,
        },
        images(),
    ),
    "mobile_vit.MobileViT": (
        {
            "image_size": (64, 64),
            "dims": [16, 24, 32],
            "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
            "num_classes": 10,
        },
        images(64),
    ),
    "pit.PiT": (
        {
            "image_size": 64,
            "patch_size": 8,
            "dim": 16,
            "num_classes": 10,
            "depth": (1, 1),
            "heads": 2,
            "mlp_dim": 32,
        },
        images(64),
    ),
    "vit_1d.ViT": (
        {
            "seq_len": 32,
            "patch_size": 8,
            "num_classes": 10,
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "mlp_dim": 64,
        },
        numbers((3, 32)),
    ),
    "vit_3d.ViT": (
        {**_USUAL, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "patch_size": None},
        numbers((3, 4, 32, 32)),
    ),
    "vivit.ViViT": (
        {
            "image_size": 32,
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
            "num_classes": 10,
            "dim": 32,
            "spatial_depth": 1,
            "temporal_depth": 1,
            "heads": 2,
            "mlp_dim": 64,
        },
        numbers((3, 4, 32, 32)),
    ),
    "cct.CCT": (
        {
            "img_size": (32, 32),
            "embedding_dim": 32,
            "n_conv_layers": 1,
            "num_layers": 2,
            "num_heads": 2,
            "mlp_ratio": 2.0,
            "num_classes": 10,
            "positional_embedding": "learnable",
        },
        images(),
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = {}
    for name in _PLAIN:
        options = {**_USUAL, **_OPTIONS.get(name, {})}
        rows[name] = partial(_built, name, options), images()
    for name, (options, form) in _OTHERS.items():
        rows[name] = partial(_built, name, options), form
    return table("vit_pytorch", rows)


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    module, kind = name.split(".")
    given = {k: v for k, v in options.items() if v is not None}
    found = importlib.import_module(f"vit_pytorch.{module}")
    model: nn.Module = getattr(found, kind)(**given)
    return model
