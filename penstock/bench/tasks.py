"""What is trained: a model, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.loading import load_model
from penstock.planning.tuning import mean_square

RESNET50 = "torchvision.models:resnet50"
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What all contestants do the same step of.

    Attributes:
        title: for figures.
        model: the module, in training mode.
        args: positional arguments of the batch.
        kwargs: keyword arguments of the batch.
        loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` without a target.
        target: a tensor with a row for each of the batch's, or `None`.
    """

    title: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFn
    target: torch.Tensor | None = None


def resnet50(rows: int) -> Task:
    """The tutorial's: images of 128x128, 1000 classes, squared error against one-hot labels."""
    model = load_model(RESNET50).train()
    images = torch.randn(rows, 3, 128, 128)
    labels = F.one_hot(torch.randint(1000, (rows,)), 1000).float()
    return Task("ResNet-50, 128x128 images", model, (images,), {}, F.mse_loss, labels)


def given(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None = None,
) -> Task:
    """Any model on a batch of the user's; without a loss it is the outputs' mean square."""
    return Task(type(model).__name__, model.train(), args, kwargs, loss_fn or mean_square)
