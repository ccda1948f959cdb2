"""Trains a small U-Net to segment pictures, some of whose pixels are not labelled."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

IGNORE = 255


def scenes(count: int, classes: int, size: int, seed: int) -> TensorDataset:
    """Rectangles of several colours; their borders are not labelled."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(count, 3, size, size, generator=draw)
    masks = torch.zeros(count, size, size, dtype=torch.long)
    for image, mask in zip(images, masks, strict=True):
        for kind in range(1, classes):
            y, x, h, w = torch.randint(4, size // 2, (4,), generator=draw).tolist()
            image[(kind - 1) % 3, y : y + h, x : x + w] += 1.0
            mask[y - 1 : y + h + 1, x - 1 : x + w + 1] = IGNORE
            mask[y : y + h, x : x + w] = kind
    return TensorDataset(images, masks)


class DoubleConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, inside // 2, 2, stride=2)
        self.conv = DoubleConv(inside, outside)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = Up(4 * width, 2 * width)
        self.up2 = Up(2 * width, width)
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, classes: int) -> float:
    """The mean over classes of intersection over union."""
    model.eval()
    counts = torch.zeros(classes, classes)
    for images, masks in loader:
        predicted = model(images).argmax(1)
        valid = masks != IGNORE
        pairs = masks[valid] * classes + predicted[valid]
        counts += pairs.bincount(minlength=classes**2).view(classes, classes)
    model.train()
    both = counts.diag()
    return (both / (counts.sum(0) + counts.sum(1) - both).clamp(min=1)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--output", default="segmentation.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    train = DataLoader(scenes(27, args.classes, 33, 0), args.batch_size, shuffle=True)
    val = DataLoader(scenes(12, args.classes, 33, 1), args.batch_size)
    model = UNet(args.classes)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=args.learning_rate, weight_decay=1e-8, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)

    model = ps.Pipeline(model, (train.dataset.tensors[0][: args.batch_size],), devices=2)

    for epoch in range(args.epochs):
        model.train()
        for images, masks in train:
            optimizer.zero_grad(set_to_none=True)
            loss = model.train_step(
                images,
                target=masks,
                loss_fn=criterion,
                weight=lambda masks: (masks != IGNORE).sum(),
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        score = evaluate(model, val, args.classes)
        scheduler.step(score)
        print(f"epoch {epoch}: loss {loss.item():.4f}, mean IoU {score:.4f}")

    torch.save(model.state_dict(), args.output)


if __name__ == "__main__":
    main()
