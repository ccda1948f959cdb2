"""Small packages, one architecture each: efficient attention, mixers, capsules of memory."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import Form, images, numbers, table, words

_TEXT, _SEQUENCE = words(32, 64), numbers((32, 16))
_TOKENS = {"num_tokens": 64, "dim": 16, "depth": 2, "heads": 2, "max_seq_len": 32}
_MODELS: dict[str, tuple[dict[str, Any], Form]] = {
    "linformer.LinformerLM": (
        {"num_tokens": 64, "dim": 16, "seq_len": 32, "depth": 2, "heads": 2, "k": 8},
        _TEXT,
    ),
    "linformer.Linformer": ({"dim": 16, "seq_len": 32, "depth": 2, "heads": 2, "k": 8}, _SEQUENCE),
    "performer_pytorch.PerformerLM": (
        {**_TOKENS, "dim_head": 8, "nb_features": 8, "causal": False},
        _TEXT,
    ),
    "performer_pytorch.Performer": (
        {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "nb_features": 8},
        _SEQUENCE,
    ),
    "g_mlp_pytorch.gMLP": ({"num_tokens": 64, "dim": 16, "depth": 3, "seq_len": 32}, _TEXT),
    "g_mlp_pytorch.gMLPVision": (
        {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 3},
        images(),
    ),
    "mlp_mixer_pytorch.MLPMixer": (
        {
            "image_size": 32,
            "channels": 3,
            "patch_size": 8,
            "dim": 16,
            "depth": 3,
            "num_classes": 5,
        },
        images(),
    ),
    "perceiver_pytorch.PerceiverIO": (
        {
            "dim": 16,
            "depth": 2,
            "num_latents": 8,
            "latent_dim": 16,
            "latent_dim_head": 8,
            "queries_dim": 16,
        },
        _SEQUENCE,
    ),
    "axial_attention.AxialImageTransformer": (
        {"dim": 8, "depth": 2, "heads": 2, "reversible": False},
        images(16, 8),
    ),
    "axial_attention.AxialAttention": (
        {"dim": 8, "dim_index": 1, "heads": 2, "num_dimensions": 2},
        images(16, 8),
    ),
    "local_attention.LocalTransformer": (
        {
            "num_tokens": 64,
            "dim": 16,
            "depth": 2,
            "max_seq_len": 32,
            "local_attn_window_size": 8,
        },
        _TEXT,
    ),
    "linear_attention_transformer.LinearAttentionTransformerLM": (
        {**_TOKENS, "causal": False},
        _TEXT,
    ),
    "conformer.Conformer": (
        {"dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "conv_kernel_size": 7},
        _SEQUENCE,
    ),
    "nystrom_attention.Nystromformer": (
        {"dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "num_landmarks": 8},
        _SEQUENCE,
    ),
    "sinkhorn_transformer.SinkhornTransformerLM": ({**_TOKENS, "bucket_size": 8}, _TEXT),
    "slot_attention.SlotAttention": ({"num_slots": 4, "dim": 16, "iters": 3}, _SEQUENCE),
    "soft_moe_pytorch.SoftMoE": ({"dim": 16, "seq_len": 32, "num_experts": 4}, _SEQUENCE),
    "MEGABYTE_pytorch.MEGABYTE": (
        {"num_tokens": 64, "dim": (16, 8), "depth": (2, 1), "max_seq_len": (8, 4), "heads": 2},
        _TEXT,
    ),
    "iTransformer.iTransformer": (
        {
            "num_variates": 6,
            "lookback_len": 16,
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "dim_head": 8,
            "pred_length": 4,
        },
        numbers((16, 6)),
    ),
    "vector_quantize_pytorch.VectorQuantize": ({"dim": 16, "codebook_size": 8}, _SEQUENCE),
    "vector_quantize_pytorch.FSQ": ({"levels": [4, 4, 4], "dim": 16}, _SEQUENCE),
    "st_moe_pytorch.MoE": ({"dim": 16, "num_experts": 4}, _SEQUENCE),
    "resnest.torch.resnest50_fast_1s1x64d": ({"num_classes": 5}, images(64)),
    "torchxrayvision.models.DenseNet": ({"weights": None, "num_classes": 5}, images(64, 1)),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = {
        name: (partial(_built, name, options), form) for name, (options, form) in _MODELS.items()
    }
    return table("lucidrains", rows)


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    module, _, kind = name.rpartition(".")
    model: nn.Module = getattr(importlib.import_module(module), kind)(**options)
    return model
