"""Trains a UNet of diffusers to predict noise, and samples from it."""

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional as F
from torch.utils.data import DataLoader

import penstock as ps


def pictures(count: int, size: int) -> torch.Tensor:
    """Bright squares on dark ground, between -1 and 1."""
    draw = torch.Generator().manual_seed(0)
    images = -torch.ones(count, 1, size, size)
    for image in images:
        top, left, side = torch.randint(2, size // 2, (3,), generator=draw).tolist()
        image[:, top : top + side, left : left + side] = 1.0
    return images


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resolution", type=int, default=16)
    parser.add_argument("--train-batch-size", type=int, default=8)
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lr-warmup-steps", type=int, default=2)
    parser.add_argument("--ddpm-num-steps", type=int, default=100)
    parser.add_argument("--ddpm-num-inference-steps", type=int, default=4)
    parser.add_argument("--output", default="diffusion.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=args.resolution,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    ema_model = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    noise_scheduler = DDPMScheduler(num_train_timesteps=args.ddpm_num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-6)
    loader = DataLoader(pictures(36, args.resolution), args.train_batch_size, shuffle=True)
    lr_scheduler = get_cosine_schedule_with_warmup(
        optimizer, args.lr_warmup_steps, args.num_epochs * len(loader)
    )

    example = loader.dataset[: args.train_batch_size], torch.arange(args.train_batch_size)
    model = ps.Pipeline(model, example, devices=2)

    for epoch in range(args.num_epochs):
        model.train()
        for clean_images in loader:
            noise = torch.randn(clean_images.shape)
            timesteps = torch.randint(0, args.ddpm_num_steps, (len(clean_images),))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            model_output = model(noisy_images, timesteps).sample
            loss = F.mse_loss(model_output, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
        print(f"epoch {epoch}: loss {loss.item():.4f}, lr {lr_scheduler.get_last_lr()[0]:.2e}")

    weights = model.state_dict()
    torch.save({name: value.clone() for name, value in weights.items()}, args.output)
    ema_model.copy_to(model.parameters())
    model.eval()
    noise_scheduler.set_timesteps(args.ddpm_num_inference_steps)
    sample = torch.randn(4, 1, args.resolution, args.resolution)
    for t in noise_scheduler.timesteps:
        with torch.no_grad():
            sample = noise_scheduler.step(model(sample, t).sample, t, sample).prev_sample
    print(f"samples: mean {sample.mean():.3f}, standard deviation {sample.std():.3f}")


if __name__ == "__main__":
    main()
