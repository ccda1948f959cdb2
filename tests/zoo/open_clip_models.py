"""open_clip: pairs of small towers for images and texts, from configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import both, images, table, words

_VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
_TEXT = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "CLIP": ("CLIP", _VISION, _TEXT, {}),
    "CLIP, a dictionary": ("CLIP", _VISION, _TEXT, {"output_dict": True}),
    "CLIP, quick GELU": ("CLIP", _VISION, _TEXT, {"quick_gelu": True}),
    "CLIP, ResNet": (
        "CLIP",
        {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "head_width": 16},
        _TEXT,
        {},
    ),
    "CLIP, patch dropout": ("CLIP", {**_VISION, "patch_dropout": 0.5}, _TEXT, {}),
    "SigLIP": (
        "CustomTextCLIP",
        _VISION,
        {**_TEXT, "no_causal_mask": True, "pool_type": "last", "proj_bias": True},
        {"init_logit_bias": -10.0},
    ),
    "CustomTextCLIP, timm": (
        "CustomTextCLIP",
        {
            "image_size": 32,
            "timm_model_name": "resnet10t",
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
        },
        _TEXT,
        {},
    ),
    "CoCa": (
        "CoCa",
        {**_VISION, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        {**_TEXT, "embed_cls": True, "output_tokens": True},
        {"multimodal_cfg": {**_TEXT, "dim_head": 16, "attn_pooler_heads": 2}},
    ),
}


def entries() -> list[Entry]:
    """Each with images and tokens."""
    return table(
        "open_clip",
        {
            name: (
                partial(_built, kind, vision, text, options),
                both(images(vision["image_size"]), words(12, 64)),
            )
            for name, (kind, vision, text, options) in _MODELS.items()
        },
    )


def _built(kind: str, vision: Any, text: Any, options: Any) -> nn.Module:
    import open_clip

    model: nn.Module = getattr(open_clip, kind)(
        embed_dim=32, vision_cfg=vision, text_cfg=text, **options
    )
    return model
