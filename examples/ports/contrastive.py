"""Trains a small ResNet by SimCLR: two views of every picture, which find each other."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock


class TwoViews(Dataset):
    """Blobs of colour; a view is one of them shifted, flipped, and with noise."""

    def __init__(self, count: int, size: int) -> None:
        draw = torch.Generator().manual_seed(0)
        coarse = torch.rand(count, 3, 4, 4, generator=draw)
        self.images = F.interpolate(coarse, size=size, mode="bilinear")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.view(self.images[k]), self.view(self.images[k])

    def view(self, image: torch.Tensor) -> torch.Tensor:
        shift = torch.randint(-4, 5, (2,)).tolist()
        image = torch.roll(image, shift, dims=(1, 2))
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return image + 0.1 * torch.randn(image.shape)


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim: int) -> None:
        super().__init__()
        self.backbone = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=out_dim)
        width = self.backbone.fc.in_features
        self.backbone.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), self.backbone.fc)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x)


def info_nce_loss(features: torch.Tensor, temperature: float) -> torch.Tensor:
    """Every row's other view has to be nearer than all other rows."""
    features = F.normalize(features, dim=1)
    similarity = features @ features.t() / temperature
    count = len(features)
    similarity = similarity.masked_fill(torch.eye(count, dtype=torch.bool), float("-inf"))
    labels = (torch.arange(count) + count // 2) % count
    return F.cross_entropy(similarity, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--output", default="contrastive.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(TwoViews(48, 32), args.batch_size, shuffle=True, drop_last=True)
    model = ResNetSimCLR(out_dim=32)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        for images in loader:
            images = torch.cat(images, dim=0)
            features = model(images)
            loss = info_nce_loss(features, args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, args.output)


if __name__ == "__main__":
    main()
