"""A training script after those of timm."""

import argparse
import logging
from collections import OrderedDict
from contextlib import suppress

import torch
import torch.nn as nn

from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, accuracy

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="test_resnet")
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--channels-last", action="store_true")


def main():
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    model = create_model(args.model, num_classes=10)
    model.to(device=device)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
    images, labels = torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))
    loader_train = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), batch_size=4, shuffle=True
    )
    train_loss_fn = LabelSmoothingCrossEntropy(smoothing=0.1).to(device)
    validate_loss_fn = nn.CrossEntropyLoss().to(device)
    for epoch in range(2):
        train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, args, device=device)
        print(validate(model, loader_train, validate_loss_fn, args, device=device))
    torch.save(model.state_dict(), "model.pth")


def train_one_epoch(
    epoch,
    model,
    loader,
    optimizer,
    loss_fn,
    args,
    device=torch.device("cuda"),
    amp_autocast=suppress,
):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        if args.channels_last:
            input = input.contiguous(memory_format=torch.channels_last)

        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)

        losses_m.update(loss.item(), input.size(0))

        optimizer.zero_grad()
        loss.backward(create_graph=False)
        if args.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, args, device=torch.device("cuda"), amp_autocast=suppress):
    losses_m = AverageMeter()
    top1_m = AverageMeter()
    model.eval()
    with torch.no_grad():
        for batch_idx, (input, target) in enumerate(loader):
            input = input.to(device)
            target = target.to(device)
            with amp_autocast():
                output = model(input)
                if isinstance(output, (tuple, list)):
                    output = output[0]
                loss = loss_fn(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses_m.update(loss.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg)])


if __name__ == "__main__":
    main()
