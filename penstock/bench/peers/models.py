"""What every peer trains: ResNet-50 and its hand cuts, a synthetic batch, a loss, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 1000

# torchvision's compiled operators do not load beside a CPU build of torch, and its import looks
# for two of them; declaring those is enough for its models. The library must stay alive. It is
# made here, when this is imported, because a process that is handed a model imports torchvision
# to read it.
if not hasattr(torch.ops.torchvision, "nms"):
    _TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
    _TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


Loss = Callable[[Tensor, Tensor], Tensor]
Data = Callable[[], tuple[Tensor, Tensor]]


class Work(Protocol):
    """One training step of any model, the same for every peer; it can be pickled."""

    @property
    def num_microbatches(self) -> int:
        """In how many equal pieces the batch is run."""

    @property
    def loss(self) -> Loss:
        """Gives a mean over rows, from an output and its target."""

    def data(self) -> tuple[Tensor, Tensor]:
        """The batch, and its target."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that every peer uses for its share of `parameters`."""


@dataclass(frozen=True)
class Given:
    """Any model's step.

    Attributes:
        make: gives the batch and its target; a function of a module, so that it can be pickled.
        loss: gives a mean over rows, from an output and its target.
        num_microbatches: in how many equal pieces the batch is run.
        learning_rate: of plain SGD.
    """

    make: Data
    loss: Loss
    num_microbatches: int = 1
    learning_rate: float = 0.001

    def data(self) -> tuple[Tensor, Tensor]:
        """The batch, and its target."""
        return self.make()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD, without momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate)


@dataclass(frozen=True)
class Task:
    """One training step of ResNet-50, the same for every peer.

    Attributes:
        batch: images per step.
        image: height and width of an image.
        num_microbatches: in how many equal pieces the batch is run.
        learning_rate: of plain SGD.
        seed: of the synthetic batch.

    Raises:
        ValueError: the batch does not divide into equal micro-batches.
    """

    batch: int
    image: int
    num_microbatches: int = 1
    learning_rate: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or self.batch % self.num_microbatches:
            raise ValueError(
                f"a batch of {self.batch} is not {self.num_microbatches} equal micro-batches, "
                "which not every peer can run; choose a divisor of the batch"
            )

    @property
    def loss(self) -> Loss:
        """The mean squared error against the one-hot labels."""
        return loss_function

    @property
    def microbatch_size(self) -> int:
        """The rows of one micro-batch."""
        return self.batch // self.num_microbatches

    def data(self) -> tuple[Tensor, Tensor]:
        """Images (batch, 3, image, image) and one-hot labels (batch, 1000), both float32."""
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(self.batch, 3, self.image, self.image, generator=generator)
        labels = torch.randint(NUM_CLASSES, (self.batch,), generator=generator)
        return images, F.one_hot(labels, NUM_CLASSES).float()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD, without momentum."""
        return torch.optim.SGD(parameters, lr=self.learning_rate)


def loss_function(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over all entries of the output."""
    return F.mse_loss(output, target)


def resnet50(seed: int = 0) -> nn.Module:
    """ResNet-50 in training mode, its parameters a function of `seed` alone."""
    from torchvision import models

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = models.resnet50(weights=None, num_classes=NUM_CLASSES)
    return model


def tutorial_cut(seed: int = 0) -> list[nn.Module]:
    """ResNet-50 in two stages, cut after `layer2` as PyTorch's tutorials do."""
    return _cut(resnet50(seed), after=["layer2"])


def quarter_cut(seed: int = 0) -> list[nn.Module]:
    """ResNet-50 in four stages, one `layer` in each: for two stages per process."""
    return _cut(resnet50(seed), after=["layer1", "layer2", "layer3"])


def _cut(model: nn.Module, after: Collection[str]) -> list[nn.Module]:
    """A ResNet cut after the named children; each stage maps one tensor to one tensor."""
    stages = [nn.Sequential()]
    for name, child in model.named_children():
        if name == "fc":
            stages[-1].add_module("flatten", nn.Flatten(1))
        stages[-1].add_module(name, child)
        if name in after:
            stages.append(nn.Sequential())
    return list(stages)
