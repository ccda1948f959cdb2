"""`torch.distributed.pipelining` over gloo, with stages that were cut by hand or handed over."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from penstock.bench.peers.models import Task, Work, quarter_cut, tutorial_cut
from penstock.bench.peers.peer import CrewPeer, Peer, Reading, seconds_between_barriers
from penstock.bench.peers.processes import Place

# What a comparison offers, by torch's names: one stage in each process, or two of them.
SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE, *LOOPED)
COUNTS = (2, 4, 8, 16)  # of micro-batches: those among which Penstock's planner looks as well

# Schedules that deal four stages to two ranks as 0 1 1 0; the others deal 0 1 0 1.
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class _Part:
    """One stage: its module, and, on the meta device, what one micro-batch puts in and gets out."""

    index: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Rank:
    """One process of the pipeline: its stages, their schedule and their optimizer."""

    def __init__(
        self, task: Work, schedule: str, num_stages: int, parts: bytes, place: Place
    ) -> None:
        place.join_gloo()
        stages = [_stage(part, num_stages) for part in pickle.loads(parts)]
        modules = nn.ModuleList(stage.submod for stage in stages)
        self._optimizer = task.optimizer(modules.parameters())
        self._schedule = _schedule(schedule, stages, task)
        inputs, target = task.data()
        self._inputs = (inputs,) if any(stage.is_first for stage in stages) else ()
        self._target = target if any(stage.is_last for stage in stages) else None
        self._losses: list[Tensor] = []

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step(
            *self._inputs, target=self._target, losses=self._losses, return_outputs=False
        )
        self._optimizer.step()

    def step(self) -> Reading:
        """One training step."""
        seconds = seconds_between_barriers(self._step)
        return Reading(seconds, sum(loss.item() for loss in self._losses))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _stage(part: _Part, num_stages: int) -> PipelineStage:
    # Without both examples torch finds the shapes by running every later stage on uninitialised
    # memory, which ruins the stage's BatchNorm statistics.
    return PipelineStage(
        part.module,
        part.index,
        num_stages,
        torch.device("cpu"),
        input_args=part.inputs,
        output_args=part.outputs,
    )


def _schedule(name: str, stages: list[PipelineStage], task: Work) -> Any:
    kind = get_schedule_class(name)
    num_microbatches, loss = task.num_microbatches, task.loss
    return kind(
        stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
        num_microbatches,
        # The loss carries the weight of its micro-batch, which saves torch's own way of scaling:
        # one more pass over all gradients at the end of the step.
        loss_fn=lambda output, target: loss(output, target) / num_microbatches,
        scale_grads=False,
    )


def _parts(stages: Sequence[nn.Module], task: Work) -> list[_Part]:
    """The stages with the shapes between them, which are found without computing anything.

    Raises:
        TypeError: a stage gives something else than tensors.
        Exception: what a stage raised, such as one that begins by changing its input in place,
            which torch's pipeline cannot run because that input is a leaf.
    """
    parts = []
    batch = task.data()[0]
    size = len(batch) // task.num_microbatches
    inputs: tuple[Tensor, ...] = (torch.empty_like(batch[:size], device="meta"),)
    for index, module in enumerate(stages):
        try:
            results = copy.deepcopy(module).to("meta")(*inputs)
        except Exception as error:
            shapes = [tuple(value.shape) for value in inputs]
            error.add_note(f"in stage {index}, for inputs of the shapes {shapes}")
            raise
        outputs = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(value, Tensor) for value in outputs):
            raise TypeError(f"stage {index} gives {type(results).__name__}, not tensors")
        leaves = tuple(value.detach().requires_grad_(value.requires_grad) for value in outputs)
        parts.append(_Part(index, module, inputs, leaves))
        inputs = parts[-1].outputs
    return parts


def _deal(schedule: str, num_stages: int, num_ranks: int) -> list[list[int]]:
    """The stages of every rank."""
    v_shaped = schedule in _V_SHAPED
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage in range(num_stages):
        lap, place = divmod(stage, num_ranks)
        ranks[num_ranks - 1 - place if v_shaped and lap % 2 else place].append(stage)
    return ranks


def torch_pipelining(
    *,
    batch: int,
    image: int,
    microbatches: int,
    schedule: str = "1F1B",
    stages: Sequence[nn.Module] | None = None,
    learning_rate: float = 0.001,
    **options: Any,
) -> Peer:
    """A pipeline of `torch.distributed.pipelining` on ResNet-50, one thread in each process.

    Args:
        batch: images per step.
        image: their height and width.
        microbatches: the number of micro-batches.
        schedule: one of `SCHEDULES`, or any other that torch knows by name.
        stages: see `torch_pipelining_of`; by default ResNet-50 cut by hand, in as many stages as
            the schedule needs.
        learning_rate: of SGD.
        **options: of `torch_pipelining_of`, which also says what is raised.
    """
    task = Task(batch, image, microbatches, learning_rate)
    by_hand = quarter_cut if _looped(_kind(schedule)) else tutorial_cut
    return torch_pipelining_of(task, stages or by_hand(), schedule, **options)


def torch_pipelining_of(
    task: Work,
    stages: Sequence[nn.Module],
    schedule: str = "1F1B",
    *,
    processes: int = 2,
    name: str | None = None,
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> Peer:
    """A pipeline of `torch.distributed.pipelining`, one thread in each process.

    Args:
        task: what it trains.
        stages: picklable modules of tensors, each taking what the one before gives, which the
            processes copy.
        schedule: one of `SCHEDULES`, or any other that torch knows by name.
        processes: how many.
        name: what the peer is called; it says which schedule and how many micro-batches if not
            given.
        timeout: seconds that any wait may take.
        environment: more environment variables for the processes.

    Raises:
        ValueError: torch does not know the schedule, or the batch does not divide evenly, or the
            stages do not fit the processes.
        TypeError: a stage gives something else than tensors.
        RuntimeError: a process failed to start, such as for a schedule that does not fit.
    """
    kind = _kind(schedule)
    schedule = kind.__name__.removeprefix("Schedule")
    parts = _parts(stages, task)
    if len(parts) % processes or (not _looped(kind) and len(parts) != processes):
        raise ValueError(f"{schedule} cannot run {len(parts)} stages on {processes} processes")
    builds = [
        # As bytes: multiprocessing would share the modules' memory with this process.
        partial(Rank, task, schedule, len(parts), pickle.dumps([parts[i] for i in indices]))
        for indices in _deal(schedule, len(parts), processes)
    ]
    return CrewPeer(
        name or f"torch.distributed.pipelining {schedule}, m={task.num_microbatches}",
        builds,
        timeout=timeout,
        environment=environment,
    )


def _kind(schedule: str) -> Any:
    return get_schedule_class(schedule.removeprefix("Schedule"))


def _looped(kind: Any) -> bool:
    return not issubclass(kind, PipelineScheduleSingle)
