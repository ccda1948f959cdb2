"""Trains an image classifier of timm, with timm's optimizer, scheduler and moving average."""

import argparse
from collections import OrderedDict

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy, dispatch_clip_grad
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps


def pictures(count: int, classes: int, size: int, seed: int) -> TensorDataset:
    """Noise with a stripe whose place says which class it is."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, generator=generator) * 0.5
    labels = torch.randint(classes, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[label % 3, label * size // classes] += 2.0
    return TensorDataset(images, labels)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, scheduler, amp, ema):
    model.train()
    losses = AverageMeter()
    for batch, (images, target) in enumerate(loader):
        optimizer.zero_grad()
        with amp:
            loss = model.train_step(images, target=target, loss_fn=loss_fn)
        dispatch_clip_grad(model.parameters(), args.clip_grad, mode="norm")
        optimizer.step()
        updates = epoch * len(loader) + batch + 1
        ema.update(model, step=updates)
        scheduler.step_update(num_updates=updates, metric=losses.avg)
        losses.update(loss.item(), images.size(0))
    print(f"train {epoch}: loss {losses.avg:.4f}, lr {optimizer.param_groups[0]['lr']:.2e}")
    return OrderedDict(loss=losses.avg)


@torch.no_grad()
def validate(model, loader, loss_fn, amp, name=""):
    model.eval()
    losses, top1 = AverageMeter(), AverageMeter()
    for images, target in loader:
        with amp:
            output = model(images)
            loss = loss_fn(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target)[0].item(), images.size(0))
    print(f"validation{name}: loss {losses.avg:.4f}, top 1 {top1.avg:.1f}")
    return OrderedDict(loss=losses.avg, top1=top1.avg)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-classes", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--model-ema-decay", type=float, default=0.99)
    parser.add_argument("--output", default="image.pt")
    args = parser.parse_args()

    torch.manual_seed(42)
    train = pictures(72, args.num_classes, args.img_size, seed=0)
    loader_train = DataLoader(train, args.batch_size, shuffle=True)
    loader_eval = DataLoader(pictures(40, args.num_classes, args.img_size, 1), args.batch_size)

    model = timm.create_model(args.model, num_classes=args.num_classes)
    optimizer = create_optimizer_v2(
        model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay, filter_bias_and_bn=True
    )
    model_ema = ModelEmaV3(model, decay=args.model_ema_decay, use_warmup=True)
    scheduler, num_epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=args.epochs,
        warmup_epochs=1,
        warmup_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=len(loader_train),
    )
    model = ps.Pipeline(model, (train.tensors[0][: args.batch_size],), devices=2)
    amp_autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    train_loss_fn = LabelSmoothingCrossEntropy(smoothing=args.smoothing)
    validate_loss_fn = nn.CrossEntropyLoss()

    best = None
    for epoch in range(num_epochs):
        train_one_epoch(
            *(epoch, model, loader_train, optimizer, train_loss_fn, args),
            *(scheduler, amp_autocast, model_ema),
        )
        validate(model, loader_eval, validate_loss_fn, amp_autocast)
        metrics = validate(model_ema, loader_eval, validate_loss_fn, amp_autocast, " (EMA)")
        if best is None or metrics["top1"] > best:
            best = metrics["top1"]
    torch.save(
        {
            "state_dict": model.state_dict(),
            "state_dict_ema": model_ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "metric": best,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
