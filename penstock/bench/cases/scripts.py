"""What a script does around its steps: optimizers, schedulers, averages, results, checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock.bench.cases import models
from penstock.bench.cases.case import X, Y, case, trained
from penstock.bench.cases.trainers import Found, Trainer


@case()
def sgd(trainer: Trainer) -> Found:
    """SGD with momentum, three steps."""
    trained(trainer, torch.optim.SGD, lr=0.1, momentum=0.9)
    return trainer.found()


@case()
def adamw(trainer: Trainer) -> Found:
    """AdamW, three steps."""
    trained(trainer, torch.optim.AdamW, lr=0.01)
    return trainer.found()


@case()
def schedulers(trainer: Trainer) -> Found:
    """A learning rate that warms up and then falls, and a momentum that is cycled with it."""
    trainer.step((X,), Y)
    optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
    for k in range(1, 6):
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trainer.step((X + k,), Y)
    group = optimizer.param_groups[0]
    return trainer.found(rate=torch.tensor(group["lr"]), momentum=torch.tensor(group["momentum"]))


@case()
def averaged_weights(trainer: Trainer) -> Found:
    """A moving average of the weights (`AveragedModel`)."""
    trainer.step((X,), Y)
    optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
    average = AveragedModel(trainer.part, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for k in range(1, 5):
        optimizer.step()
        average.update_parameters(trainer.part)
        optimizer.zero_grad()
        trainer.step((X + k,), Y)
    pairs = zip(trainer.own, average.module.parameters(), strict=True)
    return trainer.found(**{f"average of {name}": tensor for name, tensor in pairs})


@case()
def metrics(trainer: Trainer) -> Found:
    """Metrics of every micro-batch, computed beside the loss and returned."""

    def worst(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().max()

    trainer.step((X,), Y, metrics=worst)
    trainer.step((X[:8],), Y[:8], metrics=worst)
    return trainer.found(metrics=torch.stack(trainer.metrics) if trainer.metrics else None)


@case(models.batchnorm)
def outputs(trainer: Trainer) -> Found:
    """The model's results returned by a training step."""
    trainer.step((X,), Y, outputs=True)
    return trainer.found(outputs=trainer.outputs)


def gone_on(trainer: Trainer, optimizer: torch.optim.Optimizer) -> Found:
    """Take two more steps, close the trainer, and return what it has, without the losses.

    A trainer that resumes does not have the losses of the steps before.
    """
    for k in (2, 3):
        optimizer.zero_grad()
        trainer.step((X + k,), Y)
        optimizer.step()
    found = trainer.found()
    trainer.close()
    return {name: tensor for name, tensor in found.items() if not name.startswith("loss")}


@case()
def resumed(trainer: Trainer) -> Found:
    """Stopped and resumed from a file: AdamW, two steps and two more."""
    optimizer = trained(trainer, torch.optim.AdamW, 2, lr=0.01)
    state = optimizer.state_dict()
    other = trainer.restarted()
    again = optimizer if other is trainer else other.optimizer(torch.optim.AdamW, lr=0.01)
    if other is not trainer:
        again.load_state_dict(state)
    return gone_on(other, again)


@case()
def resumed_elsewhere(trainer: Trainer) -> Found:
    """Saved to a folder with two workers, resumed with one: AdamW, two steps and two more."""
    optimizer = trained(trainer, torch.optim.AdamW, 2, lr=0.01)
    other, again = trainer.saved_and_alone((X,), optimizer, torch.optim.AdamW, lr=0.01)
    return gone_on(other, again)
