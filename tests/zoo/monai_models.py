"""monai: networks for medical images, in two dimensions, narrow."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import Form, images, numbers, table

_IN_OUT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_LEVELS = {"channels": (4, 8, 16), "strides": (2, 2)}
_GRAY = images(32, 1)
_MODELS: dict[str, tuple[str, dict[str, Any], Form]] = {
    "UNet": ("UNet", {**_IN_OUT, **_LEVELS}, _GRAY),
    "UNet, residual": ("UNet", {**_IN_OUT, **_LEVELS, "num_res_units": 2}, _GRAY),
    "AttentionUnet": ("AttentionUnet", {**_IN_OUT, **_LEVELS}, _GRAY),
    "BasicUNet": ("BasicUNet", {**_IN_OUT, "features": (4, 4, 8, 8, 16, 4)}, _GRAY),
    "BasicUNetPlusPlus": (
        "BasicUNetPlusPlus",
        {**_IN_OUT, "features": (4, 4, 8, 8, 16, 4)},
        _GRAY,
    ),
    "DynUNet": (
        "DynUNet",
        {
            **_IN_OUT,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [4, 8, 16],
        },
        _GRAY,
    ),
    "SegResNet": ("SegResNet", {**_IN_OUT, "init_filters": 8}, _GRAY),
    "SegResNetVAE": (
        "SegResNetVAE",
        {**_IN_OUT, "init_filters": 8, "input_image_size": (32, 32)},
        _GRAY,
    ),
    "SegResNetDS": ("SegResNetDS", {**_IN_OUT, "init_filters": 8}, _GRAY),
    "VNet": ("VNet", {**_IN_OUT}, _GRAY),
    "UNETR": (
        "UNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": 32,
            "feature_size": 4,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_heads": 2,
            "spatial_dims": 2,
        },
        _GRAY,
    ),
    "SwinUNETR": (
        "SwinUNETR",
        {"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2},
        images(64, 1),
    ),
    "FlexibleUNet": (
        "FlexibleUNet",
        {
            "in_channels": 1,
            "out_channels": 2,
            "backbone": "efficientnet-b0",
            "spatial_dims": 2,
            "pretrained": False,
        },
        images(64, 1),
    ),
    "HighResNet": ("HighResNet", {**_IN_OUT}, _GRAY),
    "DenseNet121": ("DenseNet121", {**_IN_OUT}, _GRAY),
    "EfficientNetBN": (
        "EfficientNetBN",
        {
            "model_name": "efficientnet-b0",
            "pretrained": False,
            "spatial_dims": 2,
            "in_channels": 1,
            "num_classes": 2,
        },
        images(64, 1),
    ),
    "ResNet": (
        "ResNet",
        {
            "block": "basic",
            "layers": [1, 1, 1, 1],
            "block_inplanes": [4, 8, 16, 32],
            "spatial_dims": 2,
            "n_input_channels": 1,
            "num_classes": 2,
        },
        images(64, 1),
    ),
    "SEResNet50": (
        "SEResNet50",
        {"spatial_dims": 2, "in_channels": 1, "num_classes": 2, "pretrained": False},
        images(64, 1),
    ),
    "ViT": (
        "ViT",
        {
            "in_channels": 1,
            "img_size": 32,
            "patch_size": 8,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_layers": 2,
            "num_heads": 2,
            "classification": True,
            "spatial_dims": 2,
        },
        _GRAY,
    ),
    "MaskedAutoEncoderViT": (
        "MaskedAutoEncoderViT",
        {
            "in_channels": 1,
            "img_size": 32,
            "patch_size": 8,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_layers": 2,
            "num_heads": 2,
            "spatial_dims": 2,
            "decoder_hidden_size": 16,
            "decoder_mlp_dim": 32,
            "decoder_num_layers": 1,
            "decoder_num_heads": 2,
        },
        _GRAY,
    ),
    "VarAutoEncoder": (
        "VarAutoEncoder",
        {
            "spatial_dims": 2,
            "in_shape": (1, 32, 32),
            "out_channels": 1,
            "latent_size": 4,
            "channels": (4, 8),
            "strides": (2, 2),
        },
        _GRAY,
    ),
    "AutoencoderKL": (
        "AutoencoderKL",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "num_res_blocks": (1, 1),
            "channels": (8, 16),
            "attention_levels": (False, True),
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        _GRAY,
    ),
    "Regressor": (
        "Regressor",
        {
            "in_shape": (1, 32, 32),
            "out_shape": (2,),
            "channels": (4, 8),
            "strides": (2, 2),
        },
        _GRAY,
    ),
    "Classifier": (
        "Classifier",
        {"in_shape": (1, 32, 32), "classes": 3, "channels": (4, 8), "strides": (2, 2)},
        _GRAY,
    ),
    "Discriminator": (
        "Discriminator",
        {"in_shape": (1, 32, 32), "channels": (4, 8), "strides": (2, 2)},
        _GRAY,
    ),
    "Critic": (
        "Critic",
        {"in_shape": (1, 32, 32), "channels": (4, 8), "strides": (2, 2)},
        _GRAY,
    ),
    "Generator": (
        "Generator",
        {"latent_shape": (8,), "start_shape": (4, 8, 8), "channels": (8, 1), "strides": (2, 2)},
        numbers((8,)),
    ),
    "PatchDiscriminator": (
        "PatchDiscriminator",
        {"spatial_dims": 2, "channels": 4, "in_channels": 1, "num_layers_d": 2},
        _GRAY,
    ),
    "FullyConnectedNet": (
        "FullyConnectedNet",
        {"in_channels": 8, "out_channels": 2, "hidden_channels": [16, 16]},
        numbers((8,)),
    ),
    "LocalNet": (
        "LocalNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "num_channel_initial": 4,
            "extract_levels": (0, 1, 2),
            "out_kernel_initializer": "kaiming_uniform",
            "out_activation": None,
            "out_channels": 2,
        },
        _GRAY,
    ),
    "RegUNet": (
        "RegUNet",
        {"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 4, "depth": 2},
        _GRAY,
    ),
    "SENet154, narrow": (
        "SENet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "block": "se_resnet_bottleneck",
            "layers": (1, 1, 1, 1),
            "groups": 1,
            "reduction": 16,
            "num_classes": 2,
        },
        images(64, 1),
    ),
    "MedNeXt": (
        "MedNeXt",
        {
            "spatial_dims": 2,
            "init_filters": 8,
            "in_channels": 1,
            "out_channels": 2,
            "blocks_down": (1, 1),
            "blocks_bottleneck": 1,
            "blocks_up": (1, 1),
        },
        _GRAY,
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    rows = {
        name: (partial(_built, kind, options), form)
        for name, (kind, options, form) in _MODELS.items()
    }
    return table("monai", rows)


def _built(kind: str, options: dict[str, Any]) -> nn.Module:
    from monai.networks import nets

    model: nn.Module = getattr(nets, kind)(**options)
    return model
