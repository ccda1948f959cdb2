"""kornia: descriptors of patches, detectors of features, and networks for images."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import Form, images, named, table, words

_UNTRAINED = {"pretrained": False}
_PATCHES = images(32, 1)
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_SAM = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "out_chans": 8,
    "use_rel_pos": True,
    "window_size": 2,
    "global_attn_indexes": (1,),
}
_FEATURES: dict[str, tuple[dict[str, Any], Form]] = {
    "feature.HardNet": (_UNTRAINED, _PATCHES),
    "feature.HardNet8": (_UNTRAINED, _PATCHES),
    "feature.SOSNet": (_UNTRAINED, _PATCHES),
    "feature.TFeat": (_UNTRAINED, _PATCHES),
    "feature.OriNet": (_UNTRAINED, _PATCHES),
    "feature.KeyNet": (_UNTRAINED, _PATCHES),
    "feature.XFeatModel": ({}, images(64, 1)),
    "feature.DeFMO": (_UNTRAINED, images(32, 6)),
    "feature.disk._unets.Unet": (
        {"in_features": 3, "size": 5, "down": [8, 8, 8], "up": [8, 9]},
        images(),
    ),
}
_NETWORKS: dict[str, tuple[dict[str, Any], Form]] = {
    "models.dexined.DexiNed": (_UNTRAINED, images(64)),
    "models.rrdbnet.RRDBNet": (
        {
            "num_in_ch": 3,
            "num_out_ch": 3,
            "scale": 2,
            "num_feat": 8,
            "num_block": 2,
            "num_grow_ch": 4,
        },
        images(16),
    ),
    "models.small_sr.SmallSRNet": ({"upscale_factor": 2, **_UNTRAINED}, images(16, 1)),
    "models.tiny_vit.TinyViT": (
        {
            "img_size": 64,
            "num_classes": 5,
            "embed_dims": (8, 16, 16, 16),
            "depths": (1, 1, 2, 1),
            "num_heads": (1, 2, 2, 2),
            "window_sizes": (2, 2, 2, 2),
            "drop_path_rate": 0.1,
        },
        images(64),
    ),
    "models.vit.VisionTransformer": (
        {"image_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
        images(),
    ),
    "models.vit_mobile.MobileViT": ({}, images(64)),
    "models.efficient_vit.backbone.EfficientViTBackbone": (
        {"width_list": [8, 16, 16, 32, 32], "depth_list": [1, 1, 1, 1, 1], "dim": 8},
        images(64),
    ),
    "models.sam.architecture.image_encoder.ImageEncoderViT": (_SAM, images()),
    "models.yunet.model.YuNet": ({"phase": "train", **_UNTRAINED}, images(64)),
    "models.rt_detr.RTDETR": (
        {
            "model_type": "resnet18d",
            "num_classes": 5,
            "neck_hidden_dim": 32,
            "neck_dim_feedforward": 32,
            "head_hidden_dim": 32,
            "head_num_queries": 10,
            "head_num_decoder_layers": 2,
        },
        images(64),
    ),
    "models.siglip2.SigLip2Model": (
        {"vision_config": _VISION, "text_config": {**_TEXT, "max_position_embeddings": 12}},
        named(pixel_values=images(), input_ids=words(12, 64)),
    ),
    "models.paligemma.PaliGemma": (
        {**_TEXT, "vision_config": _VISION, "num_key_value_heads": 1, "head_dim": 8},
        named(input_ids=words(12, 64), pixel_values=images()),
    ),
    "models.kimi_vl.MoonViT": (
        {**_VISION, "init_pos_emb_height": 4, "init_pos_emb_width": 4},
        images(),
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = _FEATURES | _NETWORKS
    return table(
        "kornia", {n: (partial(_built, n, given), form) for n, (given, form) in rows.items()}
    )


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    module, _, kind = name.rpartition(".")
    found = importlib.import_module(f"kornia.{module}")
    if kind in _OF_CONFIGS:
        return _OF_CONFIGS[kind](found, **options)
    model: nn.Module = getattr(found, kind)(**options)
    return model


def _detector(found: Any, **options: Any) -> nn.Module:
    model: nn.Module = found.RTDETR.from_config(found.RTDETRConfig(**options))
    return model


def _siglip(found: Any, vision_config: Any, text_config: Any) -> nn.Module:
    given = importlib.import_module("kornia.models.siglip2.config")
    parts = given.SigLip2VisionConfig(**vision_config), given.SigLip2TextConfig(**text_config)
    model: nn.Module = found.SigLip2Model(found.SigLip2Config(*parts, projection_dim=16))
    return model


def _paligemma(found: Any, vision_config: Any, **options: Any) -> nn.Module:
    given = importlib.import_module("kornia.models.siglip2.config")
    vision = given.SigLip2VisionConfig(**vision_config)
    model: nn.Module = found.PaliGemma(found.PaliGemmaConfig(vision_config=vision, **options))
    return model


def _moonvit(found: Any, **options: Any) -> nn.Module:
    model: nn.Module = found.MoonViT(found.MoonViTConfig(**options))
    return model


_OF_CONFIGS = {
    "RTDETR": _detector,
    "SigLip2Model": _siglip,
    "PaliGemma": _paligemma,
    "MoonViT": _moonvit,
}
