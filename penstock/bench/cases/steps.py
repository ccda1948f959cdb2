"""What a step leaves: losses, gradients, buffers, and what a model gives in evaluation mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.bench.cases import models
from penstock.bench.cases.case import LABELS, TOKENS, X, Y, case
from penstock.bench.cases.trainers import Found, Trainer


@case()
def four_microbatches(trainer: Trainer) -> Found:
    """Loss and gradients, four micro-batches."""
    trainer.step((X,), Y)
    return trainer.found()


@case(microbatches=2)
def two_microbatches(trainer: Trainer) -> Found:
    """Loss and gradients, two micro-batches."""
    trainer.step((X,), Y)
    return trainer.found()


@case(
    microbatches=1,
    schedule="GPipe",
    without={"data parallelism": "one micro-batch is not shared"},
)
def fewer_microbatches_than_stages(trainer: Trainer) -> Found:
    """Fewer micro-batches than stages."""
    trainer.step((X,), Y)
    return trainer.found()


@case()
def uneven_microbatches(trainer: Trainer) -> Found:
    """A batch that does not divide: 11 rows in 4 micro-batches."""
    trainer.step((X[:11],), Y[:11])
    return trainer.found()


@case()
def another_batch_size(trainer: Trainer) -> Found:
    """A smaller last batch: 12 rows, then 8."""
    trainer.step((X,), Y)
    trainer.step((X[:8],), Y[:8])
    return trainer.found()


@case()
def sum_loss(trainer: Trainer) -> Found:
    """A loss that is a sum."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction="sum")

    trainer.step((X,), Y, loss, weight=None)
    return trainer.found()


@case()
def token_weighted_loss(trainer: Trainer) -> Found:
    """A mean over the labels that count (ignore_index), other numbers in each micro-batch."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-100)

    trainer.step((X,), LABELS, loss, weight=lambda target: (target != -100).sum())
    return trainer.found()


@case()
def several_targets(trainer: Trainer) -> Found:
    """A target that is a dictionary."""

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, target["a"]) + F.l1_loss(output, target["b"])

    trainer.step((X,), {"a": Y, "b": X}, loss)
    return trainer.found()


@case()
def accumulation(trainer: Trainer) -> Found:
    """Gradients accumulated over three steps."""
    for k in range(3):
        trainer.step((X + k,), Y)
    return trainer.found()


@case(models.batchnorm)
def accumulation_around_an_evaluation(trainer: Trainer) -> Found:
    """Gradients accumulated over two steps, with an evaluation between, and BatchNorm."""
    trainer.step((X,), Y)
    result = trainer.evaluate((X + 1,))
    trainer.step((X + 2,), Y)
    return trainer.found(result=result)


@case()
def tensor_hooks(trainer: Trainer) -> Found:
    """`register_hook` on parameters: each micro-batch's gradient is clamped."""
    for parameter in trainer.own.values():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    trainer.step((X,), Y)
    return trainer.found()


@case()
def accumulation_hooks(trainer: Trainer) -> Found:
    """`register_post_accumulate_grad_hook`: what has accumulated is clamped each time."""

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02)

    for parameter in trainer.own.values():
        parameter.register_post_accumulate_grad_hook(clamp)
    trainer.step((X,), Y)
    return trainer.found()


@case()
def module_hooks(trainer: Trainer) -> Found:
    """Hooks of modules, of the forward and of the backward, that change values and gradients."""
    first, last = (trainer.model.get_submodule(name) for name in ("0", "4"))
    first.register_forward_hook(lambda module, args, output: output * 1.5)
    last.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    last.register_full_backward_hook(lambda module, given, got: (given[0] * 3,))  # type: ignore[index]
    trainer.step((X,), Y)
    return trainer.found()


@case()
def clipping(trainer: Trainer) -> Found:
    """Gradients clipped by their norm over the whole model."""
    trainer.step((X,), Y)
    norm = trainer.clip(0.05)
    return trainer.found(norm=norm)


@case()
def autocast_bfloat16(trainer: Trainer) -> Found:
    """Autocast in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        trainer.step((X,), Y, lambda output, target: F.mse_loss(output.float(), target))
    return trainer.found()


@case()
def autocast_float16(trainer: Trainer) -> Found:
    """Autocast in float16."""
    with torch.autocast("cpu", torch.float16):
        trainer.step((X,), Y, lambda output, target: F.mse_loss(output.float(), target))
    return trainer.found()


@case(models.steep)
def loss_scaling(trainer: Trainer) -> Found:
    """float16 with a loss scale (`GradScaler`), where one stage overflows."""
    scaler = trainer.scaler(2.0**14)
    scaler.scale(torch.zeros(()))  # initialises it on ranks that compute no loss, too

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = scaler.scale(F.mse_loss(output.float(), target))
        return result

    optimizer = None
    for _ in range(4):
        with torch.autocast("cpu", torch.float16):
            trainer.step((X * 1000,), Y, loss)
        optimizer = optimizer or trainer.optimizer(torch.optim.SGD, lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return trainer.found(scale=torch.tensor(scaler.get_scale()))


@case(models.batchnorm)
def batchnorm(trainer: Trainer) -> Found:
    """BatchNorm: gradients, and the running statistics."""
    trainer.step((X,), Y)
    trainer.step((X + 1,), Y)
    return trainer.found()


@case(models.batchnorm)
def evaluation(trainer: Trainer) -> Found:
    """A result in evaluation mode after a step, with BatchNorm."""
    trainer.step((X,), Y)
    return trainer.found(result=trainer.evaluate((X,)))


@case(models.batchnorm)
def evaluation_of_ten_rows(trainer: Trainer) -> Found:
    """Ten rows in evaluation mode, in four micro-batches."""
    return trainer.found(result=trainer.evaluate((X[:10],)))


@case(recompute=True)
def recompute(trainer: Trainer) -> Found:
    """Activations recomputed in the backward."""
    trainer.step((X,), Y)
    return trainer.found()


@case(models.batchnorm, recompute=True)
def recompute_batchnorm(trainer: Trainer) -> Found:
    """Activations recomputed: BatchNorm's statistics are updated once."""
    trainer.step((X,), Y)
    return trainer.found()


@case(models.frozen)
def frozen(trainer: Trainer) -> Found:
    """A first layer that is frozen."""
    trainer.step((X,), Y)
    return trainer.found()


@case(unused=True)
def toggled(trainer: Trainer) -> Found:
    """`requires_grad` of a first layer toggled between steps."""
    layer = trainer.model.get_submodule("0")
    for wanted in (True, False, True):
        layer.requires_grad_(wanted)
        trainer.step((X,), Y)
    return trainer.found()


@case(models.Tied)
def tied_weights(trainer: Trainer) -> Found:
    """Tied weights in both stages."""
    trainer.step((X,), Y)
    trainer.sum_shared("first.0.weight")
    optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
    optimizer.step()
    return trainer.found()


@case(models.dictionary)
def dictionary(trainer: Trainer) -> Found:
    """A model that returns a dictionary."""
    trainer.step((X,), Y, models.dictionary_loss)
    return trainer.found()


@case(models.Experts)
def mixture_of_experts(trainer: Trainer) -> Found:
    """Mixtral: experts that are called as the data say, and a loss that balances them."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        logits, balance = output
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.02 * balance.sum()

    trainer.step((TOKENS,), TOKENS.roll(-1, 1), loss)
    return trainer.found()


@case(models.tokens_over_a_boundary)
def integers_over_a_boundary(trainer: Trainer) -> Found:
    """Integers (tokens) that a later stage needs."""
    trainer.step((TOKENS,), Y)
    return trainer.found()


@case(models.transposed)
def not_contiguous(trainer: Trainer) -> Found:
    """A boundary that is not contiguous."""
    trainer.step((X,), Y)
    return trainer.found()


@case(models.in_place, cuts=("1",))
def in_place(trainer: Trainer) -> Found:
    """A stage that begins in place."""
    trainer.step((X,), Y)
    return trainer.found()


@case(models.skip_connection, cuts=("second.c",))
def skip_connection(trainer: Trainer) -> Found:
    """A skip connection over the cut."""
    trainer.step((X,), Y)
    return trainer.found()
