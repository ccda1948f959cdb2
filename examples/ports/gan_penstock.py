"""Trains a small DCGAN on pictures of squares."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import penstock as ps


def pictures(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    images = -torch.ones(count, 1, 16, 16)
    for image in images:
        top, left, side = torch.randint(2, 8, (3,), generator=draw).tolist()
        image[:, top : top + side, left : left + side] = 1.0
    return images


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz: int, ngf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.main(images).view(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--niter", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--output", default="gan.pt")
    args = parser.parse_args()

    torch.manual_seed(999)
    dataloader = DataLoader(pictures(56), args.batch_size, shuffle=True)
    netG = Generator(args.nz, 16)  # noqa: N806
    netG.apply(weights_init)
    netD = Discriminator(16)  # noqa: N806
    netD.apply(weights_init)

    criterion = nn.BCELoss()
    fixed_noise = torch.randn(8, args.nz, 1, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))  # noqa: N806
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))  # noqa: N806

    netG = ps.Pipeline(netG, (fixed_noise,), devices=2)  # noqa: N806
    netD = ps.Pipeline(netD, (pictures(args.batch_size),), devices=2)  # noqa: N806
    for epoch in range(args.niter):
        for i, real in enumerate(dataloader):
            # D: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            output = netD(real)
            errD_real = criterion(output, torch.ones(len(real)))  # noqa: N806
            errD_real.backward()
            noise = torch.randn(len(real), args.nz, 1, 1)
            fake = netG(noise)
            output = netD(fake.detach())
            errD_fake = criterion(output, torch.zeros(len(real)))  # noqa: N806
            errD_fake.backward()
            optimizerD.step()

            # G: maximize log(D(G(z)))
            netG.zero_grad()
            output = netD(fake)
            errG = criterion(output, torch.ones(len(real)))  # noqa: N806
            errG.backward()
            optimizerG.step()

            d = (errD_real + errD_fake).item()
            print(f"[{epoch}/{args.niter}][{i}/{len(dataloader)}] D {d:.4f}, G {errG.item():.4f}")
        with torch.no_grad():
            fake = netG(fixed_noise)
        print(f"epoch {epoch}: pictures of mean {fake.mean():.4f}")

    torch.save({"netG": netG.state_dict(), "netD": netD.state_dict()}, args.output)


if __name__ == "__main__":
    main()
