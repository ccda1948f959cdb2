"""Peers that run the scripts of `penstock.bench.cases`, a process for each rank."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings
from abc import abstractmethod
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from penstock.bench.cases.trainers import (
    Found,
    Loss,
    Metrics,
    Setup,
    Trainer,
    Weight,
    shares,
    split,
)
from penstock.bench.peers.peer import Place
from penstock.capture.trees import tree_leaves

_BY_NAMES = StateDictOptions(flatten_optimizer_state_dict=True)


class GroupTrainer(Trainer):
    """One of the ranks of a group, which all run the script.

    Args:
        setup: what it is made for.
        seed: of the model's weights.
        group: the process group of the ranks; all ranks by default.
    """

    def __init__(self, setup: Setup, seed: int = 1, group: Any = None) -> None:
        super().__init__(setup, seed)
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def saved_and_alone(
        self, inputs: Any, optimizer: Any, kind: type[Optimizer], **options: Any
    ) -> tuple[Trainer, Any]:
        """Every rank goes on by itself, as the only one of a group."""
        name = [mkdtemp() if self._rank == 0 else ""]
        dist.broadcast_object_list(name, group=self._group)
        folder = Path(name[0])
        try:
            self._save(folder, optimizer)
            dist.barrier(self._group)
            groups = [dist.new_group([rank]) for rank in range(self._size)]
            other = type(self)(self.setup, 9, groups[self._rank])
            again = other.optimizer(kind, **options)
            other._load(folder, again)
            dist.barrier(self._group)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return other, again

    @abstractmethod
    def _save(self, folder: Path, optimizer: Any) -> None:
        """Write this rank's part of a checkpoint."""

    @abstractmethod
    def _load(self, folder: Path, optimizer: Any) -> None:
        """Load what all ranks have written into the model and the optimizer."""


class TorchPipelining(GroupTrainer):
    """One stage of `torch.distributed.pipelining` in each process.

    It gets what an expert would give it: the shapes between the stages, another schedule for
    another size of micro-batch, and the weights of micro-batches in the loss instead of torch's own
    scaling of gradients.
    """

    def __init__(self, setup: Setup, seed: int = 1, group: Any = None) -> None:
        super().__init__(setup, seed, group)
        halves = self.model.stages()  # type: ignore[operator]
        self._stages = halves if self._size > 1 else [self.model]
        if setup.recompute:
            self._stages = [Checkpointed(stage) for stage in self._stages]
        self._mine = self._stages[self._rank]
        self._schedules: dict[Any, Any] = {}
        self._loss: Loss = F.mse_loss
        self._metrics: Metrics | None = None
        self._shares: list[float] = []

    @property
    def part(self) -> nn.Module:
        return self._mine

    @property
    def own(self) -> dict[str, nn.Parameter]:
        mine = {id(p) for p in self._mine.parameters()}
        return {n: p for n, p in self.model.named_parameters() if id(p) in mine}

    @property
    def own_buffers(self) -> dict[str, Tensor]:
        mine = {id(b) for b in self._mine.buffers()}
        return {n: b for n, b in self.model.named_buffers() if id(b) in mine}

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
        self._loss, self._metrics = loss, metrics
        self._shares = shares(target, self.setup.microbatches, weight)
        given = inputs if self._rank == 0 else ()
        last = self._rank == self._size - 1
        losses: list[Tensor] = []
        schedule = self._schedule(inputs)
        results = schedule.step(*given, target=target if last else None, losses=losses)
        if last:
            self.outputs = results if outputs else None
            self.losses.append(torch.stack(losses).sum())

    def evaluate(self, inputs: Any) -> Tensor | None:
        self.model.eval()
        with torch.no_grad():
            given = inputs if self._rank == 0 else ()
            result: Tensor | None = self._schedule(inputs).eval(*given)
        return result

    def clip(self, norm: float) -> Tensor:
        total = nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad is not None])
        squares = total.square()
        dist.all_reduce(squares, group=self._group)
        total = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.own.values(), norm, total)
        return total

    def scaler(self, scale: float) -> torch.amp.GradScaler:
        return ShardedGradScaler("cpu", init_scale=scale)

    def sum_shared(self, name: str) -> None:
        dist.all_reduce(self.own[name].grad, group=self._group)

    def _save(self, folder: Path, optimizer: Any) -> None:
        """By `torch.distributed.checkpoint`, which goes by names."""
        weights, state = get_state_dict(self._mine, optimizer, options=_BY_NAMES)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)  # type: ignore[attr-defined]

    def _load(self, folder: Path, optimizer: Any) -> None:
        weights, state = get_state_dict(self._mine, optimizer, options=_BY_NAMES)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=folder, process_group=self._group)  # type: ignore[attr-defined]
        set_state_dict(self._mine, optimizer, model_state_dict=weights, optim_state_dict=state,
                       options=_BY_NAMES)  # fmt: skip

    def _weighted(self, output: Any, target: Any) -> Tensor:
        loss = self._loss(output, target)
        if self._metrics is not None:  # there is no other place to call them
            with torch.no_grad():
                self.metrics.append(self._metrics(output, target))
        return loss * self._shares.pop(0)

    def _schedule(self, inputs: Any) -> Any:
        """A schedule for batches of these shapes."""
        key = torch.is_grad_enabled(), tuple(x.shape for x in tree_leaves(inputs))
        if key not in self._schedules:
            given, results = self._example(split(inputs, self.setup.microbatches)[0])
            stage = PipelineStage(
                self._mine,
                self._rank,
                self._size,
                torch.device("cpu"),
                group=self._group,
                input_args=given,
                output_args=results,
            )
            kind: Any = get_schedule_class(self.setup.schedule)
            self._schedules[key] = kind(
                stage,
                self.setup.microbatches,
                loss_fn=self._weighted if torch.is_grad_enabled() else None,
                scale_grads=False,
            )
        return self._schedules[key]

    def _example(self, values: Any) -> tuple[Any, Any]:
        """Examples of the inputs and the results of this rank's stage for one micro-batch."""
        given = values
        with torch.random.fork_rng():
            for stage in self._stages[: self._rank + 1]:
                given = values
                results = copy.deepcopy(stage)(*copy.deepcopy(given))
                if not isinstance(results, (Tensor, tuple)):
                    return given, None
                several = results if isinstance(results, tuple) else (results,)
                values = tuple(v.detach().requires_grad_(v.requires_grad) for v in several)
        return given, values


class Checkpointed(nn.Module):
    """A stage in `torch.utils.checkpoint`."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Tensor) -> Any:
        return checkpoint(self.stage, *values, use_reentrant=False)


class DataParallel(GroupTrainer):
    """The whole model in each process, on its share of the micro-batches.

    Each rank accumulates its own without synchronising before the last, and their losses are
    weighted so that the mean over the ranks is that of the batch.
    """

    def __init__(self, setup: Setup, seed: int = 1, group: Any = None) -> None:
        super().__init__(setup, seed, group)
        self._copy: DistributedDataParallel | None = None

    def step(
        self,
        inputs: Any,
        target: Any,
        loss: Loss = F.mse_loss,
        weight: Weight = "rows",
        metrics: Metrics | None = None,
        outputs: bool = False,
    ) -> None:
        copy_ = self._built()
        self.model.train()
        m = self.setup.microbatches
        parts = [*zip(split(inputs, m), split(target, m), shares(target, m, weight), strict=True)]
        per = -(-len(parts) // self._size)
        mine = parts[per * self._rank : per * (self._rank + 1)]
        total, results, found = torch.zeros(()), [], []
        for k, (x, y, share) in enumerate(mine):
            with nullcontext() if k == len(mine) - 1 else copy_.no_sync():
                output = copy_(*x)
                part = loss(output, y) * (share * self._size)
                part.backward()
                total = total + part.detach() / self._size
            if outputs:
                results.append(output.detach())
            if metrics is not None:
                found.append(metrics(output.detach(), y))
        dist.all_reduce(total, group=self._group)
        self.losses.append(total)
        self.metrics += self._all_gathered(found)
        self.outputs = torch.cat(self._all_gathered(results)) if outputs else None

    def evaluate(self, inputs: Any) -> Tensor | None:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(*x) for x in split(inputs, self.setup.microbatches)]
        return torch.cat(found)

    def _all_gathered(self, mine: list[Tensor]) -> list[Tensor]:
        """What all ranks have, in order."""
        lists: list[Any] = [None] * self._size
        dist.all_gather_object(lists, mine, group=self._group)
        return [tensor for part in lists for tensor in part]

    def _save(self, folder: Path, optimizer: Any) -> None:
        """All ranks have the same; the first writes it."""
        if self._rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "state.pt")

    def _load(self, folder: Path, optimizer: Any) -> None:
        state = torch.load(folder / "state.pt")
        self.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def _built(self) -> DistributedDataParallel:
        if self._copy is None:
            inner = Checkpointed(self.model) if self.setup.recompute else self.model
            unused = self.setup.unused
            self._copy = DistributedDataParallel(
                inner, process_group=self._group, find_unused_parameters=unused
            )
        return self._copy


class ScriptRank:
    """A process of a peer, which runs one case after the other."""

    def __init__(self, kind: type[Trainer], place: Place) -> None:
        warnings.simplefilter("ignore")
        self._kind = kind
        place.join()

    def run(self, what: bytes) -> Found:
        """Run a case; returns what this rank has in the end.

        Args:
            what: a pickled pair of a setup and a script.
        """
        setup, script = pickle.loads(what)
        found: Found = script(self._kind(setup))
        return found

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
