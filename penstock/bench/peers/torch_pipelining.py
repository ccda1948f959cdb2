"""`torch.distributed.pipelining`, with stages that were cut by hand or by Penstock."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from penstock.bench.peers.peer import Place, Recipe, TrainingRank
from penstock.bench.peers.workload import Workload
from penstock.loading import tolerate_missing_torchvision_operators

# Schedules that deal four stages to two ranks as 0 1 1 0; the others deal 0 1 0 1.
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class _Part:
    """One stage: its module, and, on the meta device, what one micro-batch puts in and gets out."""

    index: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Rank(TrainingRank):
    """One process of the pipeline: its stages, their schedule and their optimizer."""

    def __init__(
        self, workload: Workload, schedule: str, num_stages: int, parts: bytes, place: Place
    ) -> None:
        tolerate_missing_torchvision_operators()  # stages may be parts of its models
        self.device = place.join(workload.devices)
        stages = [_stage(part, num_stages, self.device, workload) for part in pickle.loads(parts)]
        self._modules = nn.ModuleList(stage.submod for stage in stages)
        self._optimizer = workload.optimizer(self._modules.parameters())
        self._schedule = _schedule(schedule, stages, workload, self.device)
        inputs, target = (tensor.to(self.device) for tensor in workload.data())
        self._inputs = (inputs,) if any(stage.is_first for stage in stages) else ()
        self._target = target if any(stage.is_last for stage in stages) else None
        self._losses: list[Tensor] = []
        self._is_checked = False

    def _train(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step(
            *self._inputs, target=self._target, losses=self._losses, return_outputs=False
        )
        self._check_gradients()
        self._optimizer.step()

    def _check_gradients(self) -> None:
        """Raise after the first step if it has not trained some parameters: it is not a contestant.

        Torch's halved backwards leave them out in a stage whose inputs need no gradients.

        Raises:
            RuntimeError: there are some.
        """
        if self._is_checked:
            return
        self._is_checked = True
        left_out = [name for name, p in self._modules.named_parameters() if p.grad is None]
        if left_out:
            raise RuntimeError(
                f"{len(left_out)} parameters have no gradient after a step, {left_out[0]} first"
            )

    def _loss(self) -> float:
        return sum(loss.item() for loss in self._losses)


def _stage(part: _Part, num_stages: int, device: torch.device, workload: Workload) -> PipelineStage:
    module = part.module.to(device)
    if workload.autocast is not None:
        module.forward = workload.modes(device)(module.forward)  # type: ignore[operator]
    # Without both examples torch finds the shapes by running every later stage on uninitialised
    # memory, which ruins the stage's BatchNorm statistics.
    return PipelineStage(
        module,
        part.index,
        num_stages,
        device,
        input_args=part.inputs,
        output_args=part.outputs,
    )


def _schedule(
    name: str, stages: list[PipelineStage], workload: Workload, device: torch.device
) -> Any:
    kind = get_schedule_class(name)
    num_microbatches = workload.num_microbatches

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        with workload.modes(device):
            return workload.loss(output, target) / num_microbatches

    return kind(
        stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
        num_microbatches,
        # The loss carries the weight of its micro-batch, which saves torch's own way of scaling:
        # one more pass over all gradients at the end of the step.
        loss_fn=loss_of,
        scale_grads=False,
    )


def _parts(stages: Sequence[nn.Module], workload: Workload) -> list[_Part]:
    """The stages with the shapes between them, which are found without computing anything.

    Under autocast they are computed once, as tensors without memory do not know it.

    Raises:
        TypeError: a stage gives something else than tensors.
        Exception: what a stage raised, such as one that begins by changing its input in place,
            which torch's pipeline cannot run because that input is a leaf.
    """
    parts = []
    batch = workload.data()[0]
    size = len(batch) // workload.num_microbatches
    where = torch.device(workload.devices[0] if workload.autocast else "meta")
    inputs: tuple[Tensor, ...] = (torch.zeros_like(batch[:size], device=where),)
    for index, module in enumerate(stages):
        try:
            with workload.modes(where):
                results = copy.deepcopy(module).to(where)(*inputs)
        except Exception as error:
            shapes = [tuple(value.shape) for value in inputs]
            error.add_note(f"in stage {index}, for inputs of the shapes {shapes}")
            raise
        outputs = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(value, Tensor) for value in outputs):
            raise TypeError(f"stage {index} gives {type(results).__name__}, not tensors")
        leaves = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
        parts.append(_Part(index, module, _shapes(inputs), _shapes(leaves)))
        inputs = leaves
    return parts


def _shapes(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors like these, without memory."""
    like = (torch.empty_like(value.detach(), device="meta") for value in values)
    return tuple(
        shape.requires_grad_(value.requires_grad) for shape, value in zip(like, values, strict=True)
    )


def _deal(schedule: str, num_stages: int, num_ranks: int) -> list[list[int]]:
    """The numbers of the stages of every rank, by rank."""
    v_shaped = schedule in _V_SHAPED
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage in range(num_stages):
        lap, place = divmod(stage, num_ranks)
        ranks[num_ranks - 1 - place if v_shaped and lap % 2 else place].append(stage)
    return ranks


def torch_pipelining(
    workload: Workload,
    stages: Sequence[nn.Module],
    schedule: str = "1F1B",
    *,
    processes: int = 2,
) -> Recipe:
    """A pipeline of `torch.distributed.pipelining`, one thread in each process.

    Args:
        workload: what it trains.
        stages: picklable modules of tensors, each taking what the one before gives, which the
            processes copy.
        schedule: one that torch knows by name, such as `"1F1B"`.
        processes: how many.

    Raises:
        ValueError: torch does not know the schedule, or the stages do not fit the processes.
        TypeError: a stage gives something else than tensors.
    """
    kind: Any = get_schedule_class(schedule)
    schedule = kind.__name__.removeprefix("Schedule")
    parts = _parts(stages, workload)
    looped = not issubclass(kind, PipelineScheduleSingle)
    if len(parts) % processes or (not looped and len(parts) != processes):
        raise ValueError(f"{schedule} cannot run {len(parts)} stages on {processes} processes")
    builds = [
        # As bytes: multiprocessing would share the modules' memory with this process.
        partial(Rank, workload, schedule, len(parts), pickle.dumps([parts[i] for i in indices]))
        for indices in _deal(schedule, len(parts), processes)
    ]
    name = f"torch.distributed.pipelining {schedule}, m={workload.num_microbatches}"
    return Recipe(name, builds)
