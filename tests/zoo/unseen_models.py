"""Models of other authors that were run once after all others, when nothing was mended any more."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import Form, images, numbers, table, words

_VIT = {"image_size": 32, "num_classes": 10, "depth": 2, "heads": 2, "mlp_dim": 64}
_TABLE = {"categories": (3, 4), "num_continuous": 4, "dim": 8, "depth": 2, "heads": 2}
_TABULAR = {**_TABLE, "mlp_act": nn.ReLU()}


def _categories(rows: int) -> Inputs:
    """Two categories and four numbers in every row."""
    chosen = torch.stack([torch.randint(3, (rows,)), torch.randint(4, (rows,))], dim=1)
    return (chosen, torch.randn(rows, 4)), {}


def _numbers_first(rows: int) -> Inputs:
    (chosen, given), _ = _categories(rows)
    return (given, chosen), {}


def _times(rows: int) -> Inputs:
    """Images, and a step of the diffusion for every one."""
    return (torch.randn(rows, 3, 16, 16), torch.randint(100, (rows,))), {}


_MODELS: dict[str, tuple[dict[str, Any], Form]] = {
    "kornia.feature.HyNet": ({"pretrained": False}, images(32, 1)),
    "kornia.models.efficient_vit.backbone.EfficientViTLargeBackbone": (
        {"width_list": [8, 8, 16, 16, 32], "depth_list": [1, 1, 1, 1, 1], "qkv_dim": 8},
        images(64),
    ),
    "vit_pytorch.cross_vit.CrossViT": (
        {
            "image_size": 32,
            "num_classes": 10,
            "sm_dim": 16,
            "lg_dim": 24,
            "sm_patch_size": 8,
            "lg_patch_size": 16,
            "depth": 1,
        },
        images(),
    ),
    "vit_pytorch.max_vit.MaxViT": (
        {
            "num_classes": 10,
            "dim": 8,
            "depth": (1, 1),
            "dim_head": 8,
            "dim_conv_stem": 8,
            "window_size": 4,
        },
        images(32),
    ),
    "vit_pytorch.crossformer.CrossFormer": (
        {
            "num_classes": 10,
            "dim": (32, 32, 64, 64),
            "depth": (1, 1, 1, 1),
            "global_window_size": (2, 2, 1, 1),
            "local_window_size": 1,
        },
        images(32),
    ),
    "vit_pytorch.na_vit.NaViT": ({**_VIT, "patch_size": 8, "dim": 16}, images()),
    "tab_transformer_pytorch.TabTransformer": (_TABULAR, _categories),
    "tab_transformer_pytorch.FTTransformer": (_TABLE, _categories),
    "denoising_diffusion_pytorch.Unet": ({"dim": 8, "dim_mults": (1, 2)}, _times),
    "rtdl_revisiting_models.ResNet": (
        {
            "d_in": 8,
            "d_out": 2,
            "n_blocks": 2,
            "d_block": 8,
            "d_hidden_multiplier": 2.0,
            "dropout1": 0.1,
            "dropout2": 0.0,
        },
        numbers((8,)),
    ),
    "rtdl_revisiting_models.FTTransformer": (
        {
            "n_cont_features": 4,
            "cat_cardinalities": [3, 4],
            "d_out": 2,
            "n_blocks": 2,
            "d_block": 8,
            "attention_n_heads": 2,
            "attention_dropout": 0.1,
            "ffn_d_hidden_multiplier": 2.0,
            "ffn_dropout": 0.1,
            "residual_dropout": 0.0,
        },
        _numbers_first,
    ),
    "tabm.TabM.make": (
        {"n_num_features": 4, "cat_cardinalities": [3, 4], "d_out": 2, "d_block": 8, "k": 4},
        _numbers_first,
    ),
    "ncps.torch.CfC": ({"input_size": 4, "units": 8}, numbers((5, 4))),
    "ncps.torch.LTC": ({"input_size": 4, "units": 8}, numbers((5, 4))),
    "pytorch_tabnet.tab_network.TabNet": (
        {"input_dim": 8, "output_dim": 2, "group_attention_matrix": torch.eye(8)},
        numbers((8,)),
    ),
    "gateloop_transformer.Transformer": (
        {"dim": 16, "num_tokens": 64, "depth": 2, "dim_head": 8, "heads": 2},
        words(16, 64),
    ),
    "monai.networks.nets.ViTAutoEnc": (
        {
            "in_channels": 1,
            "img_size": 32,
            "patch_size": 4,
            "hidden_size": 24,
            "mlp_dim": 48,
            "num_layers": 2,
            "num_heads": 2,
            "spatial_dims": 2,
        },
        images(32, 1),
    ),
    "segmentation_models_pytorch.PAN": (
        {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2},
        images(128),
    ),
    "tsai.models.PatchTST.PatchTST": (
        {
            "c_in": 3,
            "c_out": 3,
            "seq_len": 24,
            "pred_dim": 4,
            "d_model": 8,
            "d_ff": 16,
            "n_heads": 2,
            "n_layers": 2,
            "patch_len": 8,
            "stride": 4,
        },
        numbers((3, 24)),
    ),
    "tsai.models.TCN.TCN": (
        {"c_in": 3, "c_out": 2, "layers": [8, 8]},
        numbers((3, 24)),
    ),
    "lightly.models.modules.SMoGProjectionHead": (
        {"input_dim": 16, "hidden_dim": 16, "output_dim": 8},
        numbers((16,)),
    ),
    "lightly.models.modules.LatentDynamicsPredictor": (
        {
            "num_frames": 4,
            "input_dim": 8,
            "hidden_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "conditional": False,
        },
        numbers((4, 8)),
    ),
}


def entries() -> list[Entry]:
    """All of them."""
    return table("unseen", {n: (partial(_built, n, o), form) for n, (o, form) in _MODELS.items()})


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    if name == "tabm.TabM.make":  # with the options that its authors advise
        made: nn.Module = importlib.import_module("tabm").TabM.make(**options)
        return made
    module, _, kind = name.rpartition(".")
    model: nn.Module = getattr(importlib.import_module(module), kind)(**options)
    return model
