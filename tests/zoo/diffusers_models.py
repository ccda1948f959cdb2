"""diffusers: denoisers and autoencoders, small."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import Form, both, images, named, numbers, table

_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def times(rows: int) -> Inputs:
    """A step of the diffusion for every row."""
    return (torch.randint(100, (rows,)),), {}


def classes(rows: int) -> Inputs:
    """A label for every row."""
    return (torch.randint(4, (rows,)),), {}


_TEXT = numbers((6, 16))
_UP_DOWN = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
_MODELS: dict[str, tuple[dict[str, Any], Form]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            **_BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        both(images(16), times),
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            **_BLOCKS,
            "cross_attention_dim": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        named(sample=images(16, 4), timestep=times, encoder_hidden_states=_TEXT),
    ),
    "UNet1DModel": (
        {
            "sample_size": 32,
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 32,
            "block_out_channels": (16, 32),
            "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
            "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
        },
        both(numbers((2, 32)), times),
    ),
    "AutoencoderKL": (
        {**_BLOCKS, **_UP_DOWN, "latent_channels": 4, "sample_size": 16},
        images(16),
    ),
    "AsymmetricAutoencoderKL": (
        {
            **_UP_DOWN,
            "down_block_out_channels": (16, 32),
            "up_block_out_channels": (16, 32),
            "norm_num_groups": 4,
            "sample_size": 16,
        },
        images(16),
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        images(16),
    ),
    "VQModel": (
        {**_BLOCKS, **_UP_DOWN, "latent_channels": 3, "num_vq_embeddings": 16},
        images(16),
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "encoder_block_types": ("ResBlock", "ResBlock"),
            "decoder_block_types": ("ResBlock", "ResBlock"),
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), ()),
            "decoder_qkv_multiscales": ((), ()),
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        images(16),
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "in_channels": 4, "num_embeds_ada_norm": 100},
        named(hidden_states=images(8, 4), timestep=times, class_labels=classes),
    ),
    "Transformer2DModel": (
        {**_HEADS, "in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 16},
        named(hidden_states=images(8, 16), encoder_hidden_states=_TEXT),
    ),
    "PixArtTransformer2DModel": (
        {
            **_HEADS,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        named(hidden_states=images(8, 4), encoder_hidden_states=_TEXT, timestep=times),
    ),
    "SD3Transformer2DModel": (
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        named(
            hidden_states=images(8, 4),
            encoder_hidden_states=_TEXT,
            pooled_projections=numbers((16,)),
            timestep=times,
        ),
    ),
    "SanaTransformer2DModel": (
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
        },
        named(hidden_states=images(8, 4), encoder_hidden_states=_TEXT, timestep=times),
    ),
    "PriorTransformer": (
        {**_HEADS, "embedding_dim": 16, "num_embeddings": 6, "additional_embeddings": 4},
        named(
            hidden_states=numbers((16,)),
            timestep=times,
            proj_embedding=numbers((16,)),
            encoder_hidden_states=_TEXT,
        ),
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        named(hidden_states=images(8, 4), encoder_hidden_states=_TEXT, timestep=times),
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = {
        name: (partial(_built, name, options), form) for name, (options, form) in _MODELS.items()
    }
    return table("diffusers", rows)


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    import diffusers

    diffusers.logging.set_verbosity_error()
    model: nn.Module = getattr(diffusers, name)(**options)
    return model
