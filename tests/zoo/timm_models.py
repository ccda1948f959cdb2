"""timm: one small model of every family, that is of every module of `timm.models`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.loading import tolerate_missing_torchvision_operators
from tests.zoo.entry import Entry, Inputs

# Of each module the model with the fewest parameters (counted once: building all 1371 takes
# minutes), or one of about as many that runs quicker. Not those called `test_...`: nobody uses
# them. A module that is not here, of a later timm say, takes the name that sounds smallest.
_SMALLEST = frozenset(
    """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny coat_lite_tiny convit_tiny
    convmixer_1024_20_ks9_p14 convnext_zepto_rms cpubone_nano cs3darknet_focus_s cspnext_tiny
    crossvit_tiny_240 csatv2 davit_tiny deepseek_vit_412m deit_tiny_patch16_224
    deit_tiny_distilled_patch16_224 densenet121 dla46x_c dpn48b eca_botnext26ts_256
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0
    efficientvit_m0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny
    gemma4_vit_167m ghostnet_050 gmlp_ti16_224 hardcorenas_a hgnetv2_b0 hiera_tiny_224
    hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
    lcnet_035 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0
    mambaout_femto maxvit_pico_rw_256 mobilenetv2_035 mobilenetv5_base mobileone_s0 mobilevit_xxs
    mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small nf_regnet_b0
    pit_ti_224 pnasnet5large poolformerv2_s12 pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnety_002
    repghostnet_050 repvit_m0_9 res2net50_48w_2s resnest14d resnet10t resnetv2_18 rexnet_100
    sam2_hiera_tiny samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1 skresnet18
    starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
    swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small vgg11
    visformer_tiny vit_srelpos_small_patch16_224 vit_tiny_patch16_224
    vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p
    xcit_nano_12_p16_224
    """.split()
)
_SMALL = ("zepto", "femto", "atto", "pico", "nano", "xxs", "xxt", "tiny", "_t", "mini",
          "xs", "small", "_s", "b0", "18", "0")  # fmt: skip

# Nearly all models run on images this small; those of a fixed size are built for it.
_SIZE = 64
_SIZES = {  # where 64 does not do
    "deepseek_vit_412m": 56,
    "efficientformer_l1": 224,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
}
# Modules that have no small model: one of them made shallower or narrower.
_OPTIONS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 4},
    "crossvit_tiny_240": {"img_size": 240},  # whatever comes, it scales to sizes of its own
    "deepseek_vit_412m": {"depth": 4, "embed_dim": 128, "num_heads": 4},
    "gemma4_vit_167m": {
        "depth": 4,
        "embed_dim": 128,
        "num_heads": 4,
        "intermediate_size": 256,
        "position_embedding_size": 64,
    },
    "mobilenetv5_base": {"channel_multiplier": 0.25},
    "naflexvit_base_patch16_gap": {"depth": 4},
    "nasnetalarge": {"num_features": 384, "stem_size": 32},
    "qwen3_vit_88m": {"depth": 4, "embed_dim": 192, "num_heads": 4},
    "samvit_base_patch16_224": {
        "depth": 4,
        "embed_dim": 192,
        "num_heads": 4,
        "global_attn_indexes": (1, 3),
    },
    "vgg11": {"mlp_ratio": 0.0625},
}


def entries() -> list[Entry]:
    """The smallest model of each module."""
    tolerate_missing_torchvision_operators()
    import timm

    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        chosen = [name for name in names if name in _SMALLEST]
        found += [_entry(name) for name in chosen or sorted(names, key=_rank)[:1]]
    return found


def _rank(name: str) -> tuple[int, int]:
    return next((k for k, word in enumerate(_SMALL) if word in name), len(_SMALL)), len(name)


def _entry(name: str) -> Entry:
    import timm

    config = timm.get_pretrained_cfg(name)
    size = _SIZES.get(name, _SIZE)
    options = {"img_size": size} if config is not None and config.fixed_input_size else {}
    options |= _OPTIONS.get(name, {})
    return Entry(name, "timm", partial(_built, name, options), partial(_images, size))


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def _images(size: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, size, size),), {}
