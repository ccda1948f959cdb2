"""x-transformers: one wrapper, and many kinds of attention and of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import both, images, numbers, table, words

_SIZES = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
_DECODERS: dict[str, dict[str, Any]] = {
    "Decoder": {},
    "Decoder, flash": {"attn_flash": True},
    "Decoder, rotary": {"rotary_pos_emb": True},
    "Decoder, ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "Decoder, T5's bias": {"rel_pos_bias": True},
    "Decoder, RMSNorm and SwiGLU": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "Decoder, one key for all heads": {"attn_one_kv_head": True},
    "Decoder, grouped keys": {"attn_kv_heads": 1},
    "Decoder, normalised keys": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "Decoder, residual attention": {"residual_attn": True},
    "Decoder, macaron": {"macaron": True},
    "Decoder, sandwich norm": {"sandwich_norm": True},
    "Decoder, gated residuals": {"gate_residual": True},
    "Decoder, shifted tokens": {"shift_tokens": 1},
    "Decoder, memory": {"attn_num_mem_kv": 4},
    "Decoder, talking heads": {"attn_pre_talking_heads": True},
}


def entries() -> list[Entry]:
    """Language models with causal attention of every kind, and other wrappers."""
    rows: dict[str, Any] = {
        name: (partial(_language, "Decoder", options), words(16, 64))
        for name, options in _DECODERS.items()
    }
    rows["Encoder"] = partial(_language, "Encoder", {}), words(16, 64)
    rows["Encoder, memory tokens"] = (
        partial(_language, "Encoder", {}, num_memory_tokens=4),
        words(16, 64),
    )
    rows["AutoregressiveWrapper"] = _autoregressive, words(17, 64)
    rows["ViTransformerWrapper"] = _vision, images()
    rows["ContinuousTransformerWrapper"] = _continuous, numbers((16, 8))
    rows["XTransformer"] = _pair, both(words(12, 64), words(13, 64))
    return table("x_transformers", rows)


def _layers(kind: str, **options: Any) -> Any:
    import x_transformers

    return getattr(x_transformers, kind)(**_SIZES, **options)


def _language(kind: str, layers: dict[str, Any], **options: Any) -> nn.Module:
    from x_transformers import TransformerWrapper

    inner = _layers(kind, **layers)
    model: nn.Module = TransformerWrapper(
        num_tokens=64, max_seq_len=32, attn_layers=inner, **options
    )
    return model


def _autoregressive() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    model: nn.Module = AutoregressiveWrapper(_language("Decoder", {}))
    return model


def _vision() -> nn.Module:
    from x_transformers import ViTransformerWrapper

    model: nn.Module = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=5, attn_layers=_layers("Encoder")
    )
    return model


def _continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper

    model: nn.Module = ContinuousTransformerWrapper(
        dim_in=8, dim_out=4, max_seq_len=16, attn_layers=_layers("Encoder")
    )
    return model


def _pair() -> nn.Module:
    from x_transformers import XTransformer

    sizes = {"num_tokens": 64, "depth": 2, "heads": 2, "max_seq_len": 16}
    given = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in sizes.items()}
    model: nn.Module = XTransformer(dim=16, tie_token_emb=True, **given)
    return model
