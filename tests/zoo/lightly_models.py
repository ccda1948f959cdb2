"""lightly: what its examples build for self-supervised learning, a small backbone and heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs
from tests.zoo.forms import images, table

_WIDTH = 16
_HEADS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "SimCLR": (("SimCLRProjectionHead", {"hidden_dim": 16, "output_dim": 8}),),
    "MoCo": (("MoCoProjectionHead", {"hidden_dim": 16, "output_dim": 8}),),
    "Barlow Twins": (("BarlowTwinsProjectionHead", {"hidden_dim": 16, "output_dim": 16}),),
    "BYOL": (
        ("BYOLProjectionHead", {"hidden_dim": 16, "output_dim": 8}),
        ("BYOLPredictionHead", {"input_dim": 8, "hidden_dim": 16, "output_dim": 8}),
    ),
    "SimSiam": (
        ("SimSiamProjectionHead", {"hidden_dim": 16, "output_dim": 16}),
        ("SimSiamPredictionHead", {"input_dim": 16, "hidden_dim": 8, "output_dim": 16}),
    ),
    "NNCLR": (
        ("NNCLRProjectionHead", {"hidden_dim": 16, "output_dim": 8}),
        ("NNCLRPredictionHead", {"input_dim": 8, "hidden_dim": 16, "output_dim": 8}),
    ),
    "SwaV": (
        ("SwaVProjectionHead", {"hidden_dim": 16, "output_dim": 8}),
        ("SwaVPrototypes", {"input_dim": 8, "n_prototypes": 12}),
    ),
    "DINO": (("DINOProjectionHead", {"hidden_dim": 16, "bottleneck_dim": 8, "output_dim": 12}),),
    "DINOv2": (
        ("DINOv2ProjectionHead", {"hidden_dim": 16, "bottleneck_dim": 8, "output_dim": 12}),
    ),
    "MMCR": (("MMCRProjectionHead", {"hidden_dim": 16, "output_dim": 8}),),
}


def entries() -> list[Entry]:
    """Backbones with heads, masked autoencoders, and a ResNet of its own."""
    rows: dict[str, Any] = {n: (partial(Headed, heads), images()) for n, heads in _HEADS.items()}
    rows["MAE"] = MaskedAutoencoder, masked_images
    rows["ResNet-9"] = _resnet, images()
    rows["AIM"] = AutoregressiveImages, images()
    return table("lightly", rows)


def _resnet() -> nn.Module:
    from lightly.models import ResNetGenerator

    model: nn.Module = ResNetGenerator("resnet-9", width=0.125, num_classes=5)
    return model


class Headed(nn.Module):
    """A small convolutional backbone, and heads after it."""

    def __init__(self, heads: tuple[tuple[str, dict[str, Any]], ...]) -> None:
        super().__init__()
        from lightly.models import modules

        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, _WIDTH, 3, 2, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        )
        first = {"input_dim": _WIDTH}
        self.heads = nn.ModuleList(
            getattr(modules, name)(**({} if k else first) | options)
            for k, (name, options) in enumerate(heads)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = [self.backbone(x).flatten(start_dim=1)]
        for head in self.heads:
            results.append(head(results[-1]))
        return results[1:]


def _vision_transformer(**options: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": _WIDTH, "depth": 2, "num_heads": 2}
    return VisionTransformer(**sizes, num_classes=0, **options)


def masked_images(rows: int) -> Inputs:
    """Images, and the places of the patches that are kept and of those that are not."""
    places = 1 + torch.rand(rows, 16).argsort(dim=1)
    kept = torch.cat([torch.zeros(rows, 1, dtype=torch.long), places[:, :7]], dim=1)
    return (torch.randn(rows, 3, 32, 32), kept, places[:, 7:]), {}


class MaskedAutoencoder(nn.Module):
    """`examples/pytorch/mae.py`, with the mask as an argument."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.models import modules

        self.backbone = modules.MaskedVisionTransformerTIMM(vit=_vision_transformer())
        self.decoder = modules.MAEDecoderTIMM(
            num_patches=16,
            patch_size=8,
            embed_dim=_WIDTH,
            decoder_embed_dim=8,
            decoder_depth=1,
            decoder_num_heads=2,
        )

    def forward(self, x: torch.Tensor, kept: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        from lightly.models import utils

        encoded = self.decoder.embed(self.backbone.encode(images=x, idx_keep=kept))
        length = self.backbone.sequence_length
        decoded = utils.repeat_token(self.decoder.mask_token, (len(x), length))
        decoded = utils.set_at_index(decoded, kept, encoded.type_as(decoded))
        decoded = self.decoder.decode(decoded)
        return self.decoder.predict(utils.get_at_index(decoded, masked))


class AutoregressiveImages(nn.Module):
    """`examples/pytorch/aim.py`, without a prefix mask."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.models import modules

        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": _WIDTH, "depth": 2, "num_heads": 2}
        self.backbone = modules.MaskedCausalVisionTransformer(
            **sizes, num_classes=0, class_token=False, no_embed_class=True, global_pool="avg"
        )
        self.head = modules.AIMPredictionHead(
            input_dim=_WIDTH, output_dim=3 * 8**2, hidden_dim=16, num_blocks=1
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone.forward_features(x))
