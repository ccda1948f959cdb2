"""Trainers that run a case's script: the same methods on one device, by Penstock and by peers."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import penstock as ps
from penstock.bench.uniform import replicated, uniform_plan
from penstock.capture.trees import flatten, tree_leaves, unflatten
from penstock.workers.backend import WorkerKind

Found = dict[str, Tensor]
"""What a script leaves, by name: gradients, parameters, buffers, losses, results."""

Loss = Callable[..., Tensor]
Weight = Callable[[Any], Any] | Literal["rows"] | None
Metrics = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Setup:
    """What a trainer is made for.

    Attributes:
        model: builds the model; it also has `stages()`, the two halves as somebody would write them
            by hand.
        microbatches: into how many every batch is split.
        cuts: where Penstock cuts; anywhere if there are none.
        recompute: whether activations are computed again in the backward.
        unused: whether parameters may get no gradient (DistributedDataParallel's
            `find_unused_parameters`).
        schedule: what torch.distributed.pipelining runs.
    """

    model: Callable[[], nn.Module]
    microbatches: int = 4
    cuts: Sequence[str | int] = ()
    recompute: bool = False
    unused: bool = False
    schedule: str = "1F1B"


class Trainer(ABC):
    """One way to train.

    Args:
        setup: what it is made for.
        seed: of the model's weights.

    Attributes:
        setup: what it is made for.
        model: all of it.
        losses: of every step.
        metrics: of every micro-batch, in order, of the steps with `metrics`.
        outputs: the model's result in the last step, if that had `outputs`.
    """

    def __init__(self, setup: Setup, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.setup = setup
        self.model = setup.model()
        self.losses: list[Tensor] = []
        self.metrics: list[Tensor] = []
        self.outputs: Tensor | None = None
        torch.manual_seed(5)

    @abstractmethod
    def step(
        self,
        inputs: Any,
        target: Any,
        loss: Loss = F.mse_loss,
        weight: Weight = "rows",
        metrics: Metrics | None = None,
        outputs: bool = False,
    ) -> None:
        """Run a batch forward and backward; gradients add up, and the loss goes to `losses`.

        Args:
            inputs: a tuple with the positional arguments of the model.
            target: a tensor, or a container of tensors, split like the batch.
            loss: `loss(output, target)`.
            weight: how the losses of micro-batches are combined, as of `Pipeline.train_step`.
            metrics: `metrics(output, target)` of every micro-batch goes to `self.metrics`.
            outputs: whether the model's result goes to `self.outputs`.
        """

    @abstractmethod
    def evaluate(self, inputs: Any) -> Tensor | None:
        """The result of a batch in evaluation mode; `None` on a rank that does not have it."""

    @property
    def part(self) -> nn.Module:
        """What is trained in this process."""
        return self.model

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained in this process, by name."""
        return dict(self.model.named_parameters())

    @property
    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that are updated in this process, by name."""
        return dict(self.model.named_buffers())

    def optimizer(self, kind: type[Optimizer], **options: Any) -> Any:
        """An optimizer of everything that is trained."""
        return kind(self.own.values(), **options)

    def clip(self, norm: float) -> Tensor:
        """Clip all gradients to this norm, as an expert would; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(self.own.values(), norm)

    def scaler(self, scale: float) -> torch.amp.GradScaler:
        """A gradient scaler that begins with this scale."""
        return torch.amp.GradScaler("cpu", init_scale=scale)

    def sum_shared(self, name: str) -> None:
        """Do by hand whatever else is needed for a parameter that both halves use."""
        return

    def restarted(self) -> Trainer:
        """Save the model and close this trainer; returns another that has loaded the model."""
        file = io.BytesIO()
        torch.save({k: v.detach() for k, v in (self.own | self.own_buffers).items()}, file)
        file.seek(0)
        state = torch.load(file)
        self.close()
        other = type(self)(self.setup, seed=9)
        with torch.no_grad():
            for name, tensor in (other.own | other.own_buffers).items():
                tensor.copy_(state[name])
        return other

    @abstractmethod
    def saved_and_alone(
        self, inputs: Any, optimizer: Any, kind: type[Optimizer], **options: Any
    ) -> tuple[Trainer, Any]:
        """Save model and optimizer to a folder; returns both as loaded on a single worker.

        Args:
            inputs: an example of the inputs.
            optimizer: the optimizer that has trained the model.
            kind: its class.
            **options: its arguments.

        Returns:
            a trainer that goes on with the model, and its optimizer.
        """

    def found(self, **more: Tensor | None) -> Found:
        """Everything that this process has in the end."""
        result = {f"loss {k}": loss.detach() for k, loss in enumerate(self.losses)}
        result |= {
            f"gradient of {n}": p.grad.clone() for n, p in self.own.items() if p.grad is not None
        }
        result |= {n: t.detach().clone() for n, t in (self.own | self.own_buffers).items()}
        return result | {n: t.detach().clone() for n, t in more.items() if t is not None}

    def close(self) -> None:
        """Release workers, if there are any."""
        return


class OneDevice(Trainer):
    """Plain PyTorch that accumulates micro-batches in order: the reference for all others."""

    def step(
        self,
        inputs: Any,
        target: Any,
        loss: Loss = F.mse_loss,
        weight: Weight = "rows",
        metrics: Metrics | None = None,
        outputs: bool = False,
    ) -> None:
        self.model.train()
        m, total = self.setup.microbatches, torch.zeros(())
        results: list[Any] = []
        parts = zip(split(inputs, m), split(target, m), shares(target, m, weight), strict=True)
        for x, y, share in parts:
            output = self.model(*x)
            part = loss(output, y) * share
            part.backward()
            total = total + part.detach()
            results.append(output)
            if metrics is not None:
                self.metrics.append(metrics(output.detach(), y))
        self.losses.append(total)
        self.outputs = torch.cat(results) if outputs else None

    def evaluate(self, inputs: Any) -> Tensor | None:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(*x) for x in split(inputs, self.setup.microbatches)]
        return torch.cat(found)

    def restarted(self) -> Trainer:
        """This trainer: the reference goes on without a restart."""
        return self

    def saved_and_alone(
        self, inputs: Any, optimizer: Any, kind: type[Optimizer], **options: Any
    ) -> tuple[Trainer, Any]:
        """This trainer and its optimizer: the reference goes on without a restart."""
        return self, optimizer


class Penstock(Trainer):
    """Penstock on two workers of this process: a stage each.

    Attributes:
        workers: their kind.
        stages: of a replica, each on a worker of its own.
        replicas: how many.
    """

    workers: WorkerKind = "threads"
    stages = 2
    replicas = 1

    def __init__(self, setup: Setup, seed: int = 1) -> None:
        super().__init__(setup, seed)
        self._pipe: ps.Pipeline | None = None

    def _pipeline(self, inputs: Any) -> ps.Pipeline:
        if self._pipe is None:
            setup = self.setup
            program = ps.capture(self.model, inputs)
            plan = uniform_plan(
                program,
                self.stages,
                max(setup.microbatches, self.replicas),
                cuts=list(setup.cuts) or None if self.stages > 1 else None,
                recompute="all" if setup.recompute else "none",
            )
            plan = replicated(plan, self.replicas)
            self._pipe = ps.Pipeline(
                self.model,
                inputs,
                devices=plan.devices,
                program=program,
                plan=plan,
                workers=self.workers,
            )
        return self._pipe

    def step(
        self,
        inputs: Any,
        target: Any,
        loss: Loss = F.mse_loss,
        weight: Weight = "rows",
        metrics: Metrics | None = None,
        outputs: bool = False,
    ) -> None:
        self.model.train()
        pipe = self._pipeline(inputs)
        options: Any = {"weight": weight, "metrics": metrics, "outputs": outputs}
        if self.setup.microbatches < pipe.plan.num_microbatches:  # some replicas get none
            parts, targets = (split(t, self.setup.microbatches) for t in (inputs, target))
            result = pipe.train_microbatches(parts, targets=targets, loss_fn=loss, **options)
        else:
            result = pipe.train_step(*inputs, target=target, loss_fn=loss, **options)
        if isinstance(result, Tensor):
            self.losses.append(result)
        else:
            self.losses.append(result.loss)
            self.metrics += result.metrics or ()
            self.outputs = result.outputs

    def evaluate(self, inputs: Any) -> Tensor | None:
        with torch.no_grad():
            result: Tensor = self._pipeline(inputs).eval()(*inputs)
        return result

    def optimizer(self, kind: type[Optimizer], **options: Any) -> Any:
        if self._pipe is None:
            return kind(self.own.values(), **options)
        return self._pipe.optimizer(kind, **options)

    def clip(self, norm: float) -> Tensor:
        assert self._pipe is not None
        return self._pipe.clip_grad_norm_(norm)

    def saved_and_alone(
        self, inputs: Any, optimizer: Any, kind: type[Optimizer], **options: Any
    ) -> tuple[Trainer, Any]:
        assert self._pipe is not None
        with TemporaryDirectory() as folder:
            self._pipe.save(folder, optimizer=optimizer)
            self.close()
            other = type(self)(self.setup, seed=9)
            other.stages = other.replicas = 1
            pipe = other._pipeline(inputs)
            again = pipe.optimizer(kind, **options)
            ps.load(folder).restore(pipe, optimizer=again)
        return other, again

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


class PenstockProcesses(Penstock):
    """Penstock on two worker processes: a stage each."""

    workers = "processes"


class PenstockReplicas(Penstock):
    """Penstock on two workers of this process: the whole model each."""

    stages, replicas = 1, 2


class PenstockReplicaProcesses(PenstockReplicas):
    """Penstock on two worker processes: the whole model each."""

    workers = "processes"


class PenstockTwoByTwo(PenstockProcesses):
    """Penstock on four worker processes: two replicas of two stages."""

    replicas = 2


def split(tree: Any, microbatches: int) -> list[Any]:
    """A tensor, or a container of tensors, for every micro-batch."""
    leaves, structure = flatten(tree)
    rows = len(next(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    parts = [leaf.tensor_split(min(microbatches, rows)) for leaf in leaves]
    return [unflatten(structure, list(part)) for part in zip(*parts, strict=True)]


def shares(target: Any, microbatches: int, weight: Weight) -> list[float]:
    """The factor of every micro-batch's loss in the loss of the batch."""
    parts = split(target, microbatches)
    if weight is None:
        return [1.0] * len(parts)
    counts = [float(len(tree_leaves(p)[0]) if weight == "rows" else weight(p)) for p in parts]
    return [count / sum(counts) for count in counts]
