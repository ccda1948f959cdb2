"""segmentation_models_pytorch: every decoder on a small encoder, and a U-Net on many encoders."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.forms import images, table

_DECODERS = (
    *("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3"),
    *("DeepLabV3Plus", "UPerNet"),
)
_ENCODERS = (
    *("resnet34", "resnext50_32x4d", "mobilenet_v2", "efficientnet-b0", "densenet121", "dpn68"),
    *("vgg11_bn", "se_resnet50", "mit_b0", "mobileone_s0", "timm-regnetx_002", "timm-skresnet18"),
    *("timm-resnest14d", "timm-gernet_s", "timm-mobilenetv3_small_100", "xception"),
)


def entries() -> list[Entry]:
    """All of them on pictures of 64 pixels."""
    rows = {name: (partial(_built, name, "resnet18"), images(64)) for name in _DECODERS}
    rows |= {f"Unet, {name}": (partial(_built, "Unet", name), images(64)) for name in _ENCODERS}
    rows["Segformer"] = partial(_built, "Segformer", "mit_b0"), images(64)
    rows["DPT"] = partial(_built, "DPT", "tu-vit_tiny_patch16_224.augreg_in21k"), images(224)
    return table("smp", rows)


def _built(decoder: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    model: nn.Module = getattr(smp, decoder)(encoder, encoder_weights=None, classes=2)
    return model
