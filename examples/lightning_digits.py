"""Trains a network that reads digits with Lightning, on all devices of this machine.

    python examples/lightning_digits.py [--devices 2] [--workers processes] [--epochs 4]
    python examples/lightning_digits.py --plain
    torchrun --nproc-per-node 2 examples/lightning_digits.py

`Digits` is a `LightningModule` as anybody would write it. With `--plain` Lightning trains it by
itself, on one device; otherwise Penstock runs `self.net` on all of them. The pictures are drawn in
the fonts that matplotlib carries. It needs `pip install 'penstock[lightning,report]'`.
"""

from __future__ import annotations

import argparse
from typing import Any

from penstock.loading import tolerate_missing_torchvision_operators

tolerate_missing_torchvision_operators()  # Lightning imports torchvision where it is there

import lightning  # noqa: E402
import torch  # noqa: E402
from digits import digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from penstock.integrations.lightning import PenstockStrategy  # noqa: E402


def block(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Digits(lightning.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            block(1, width),
            block(width, 2 * width),
            block(2 * width, 4 * width),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * width, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        right = (self.net(x).argmax(1) == y).float().mean()
        self.log("right", right, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="Lightning alone")
    parser.add_argument("--devices", type=int, help="how many; by default as many as are fastest")
    parser.add_argument("--workers", default="auto", help="threads or processes")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--count", type=int, default=1024, help="pictures to train on")
    chosen = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    strategy: Any = "auto"
    if not chosen.plain:
        strategy = PenstockStrategy(devices=chosen.devices, workers=chosen.workers)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="auto",
        max_epochs=chosen.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    train = DataLoader(digits(chosen.count, seed=1), batch_size=32, shuffle=True, drop_last=True)
    trainer.fit(Digits(), train, DataLoader(digits(512, seed=2), batch_size=64))
    if trainer.is_global_zero:
        print(f"{trainer.callback_metrics['right']:.1%} of the digits held out are read right")


if __name__ == "__main__":
    main()
