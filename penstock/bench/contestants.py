"""The contestants of `penstock bench`: one device, one process and pipelines, on the same task."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.bench.turns import UNAUDITED, Contestant, timed
from penstock.capture import ROWS, Program, capture
from penstock.capture.trees import flatten, unflatten
from penstock.devices.choice import existing_devices, threads_per_worker
from penstock.devices.kinds import kind_of
from penstock.display.terminal import Progress
from penstock.engine.ends import to_device
from penstock.engine.microbatch import split
from penstock.loading import load_model
from penstock.pipeline import Pipeline
from penstock.plan import Plan, plan
from penstock.planning.tuning import mean_square
from penstock.profile.measure import profile
from penstock.profile.rows import split_rows
from penstock.workers.thread_pool import ThreadPool

RATE = 0.001
RESNET50 = "torchvision.models:resnet50"
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Task:
    """The training task of all contestants: a model, a batch and a loss.

    Attributes:
        title: the first words of the figures' titles.
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

    @classmethod
    def tutorial(cls, rows: int) -> Task:
        """The tutorial's: images of 128x128, 1000 classes, squared error against one-hot labels."""
        model = load_model(RESNET50).train()
        images = torch.randn(rows, 3, 128, 128)
        labels = F.one_hot(torch.randint(1000, (rows,)), 1000).float()
        return cls("ResNet-50, 128x128 images", model, (images,), {}, F.mse_loss, labels)

    @classmethod
    def given(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: LossFn | None = None,
    ) -> Task:
        """Any model on a batch of the user's; without a loss it is the outputs' mean square."""
        return cls(type(model).__name__, model.train(), args, kwargs, loss_fn or mean_square)


class Field:
    """A task that was captured and profiled once; makes contestants that train it with SGD.

    Args:
        task: what the contestants train. On CPUs they all train the same parameters.
        devices: the devices of the pipelines.
        stack: closes the workers of the contestants.
        progress: called with the progress of profiling, as in `penstock.profile`.

    Attributes:
        rows: the number of rows of the batch.
        threads: intra-op threads of each CPU worker.
        costs: the profile.
    """

    def __init__(
        self,
        task: Task,
        devices: Sequence[str],
        stack: ExitStack,
        progress: Progress | None = None,
    ) -> None:
        self.task = task
        self.devices = tuple(devices)
        self._stack = stack
        self._places = existing_devices(devices)
        self.on_cpu = all(place.type == "cpu" for place in self._places)
        self.threads = threads_per_worker(devices)
        self.program = capture(task.model, task.args, task.kwargs)
        self.rows = self.program.example_sizes[ROWS]
        self.costs = profile(
            self.program, devices=self.devices, threads=self.threads, progress=progress
        )

    @property
    def fewest_rows(self) -> int:
        """The smallest micro-batch that the model takes (BatchNorm may refuse a single row)."""
        return max(self.costs.on(device).rows[0] for device in self.devices)

    def plan(self, num_microbatches: int | None = None) -> Plan:
        """The best plan of stages for that many micro-batches, or for the best number of them."""
        count: Any = "auto" if num_microbatches is None else num_microbatches
        return plan(self.costs, num_microbatches=count, replicas=1)

    def plan_in_turn(self) -> Plan:
        """A plan with one device busy at a time; ResNet on two is cut as in the tutorial."""
        starts = [k for k, label in enumerate(self.costs.labels) if label.startswith("layer3")]
        by_hand = (starts[0],) if starts and len(self.devices) == 2 else None
        return plan(self.costs, num_microbatches=1, schedule="naive", cuts=by_hand, replicas=1)

    # -- contestants ------------------------------------------------------------------------

    def pipeline(self, name: str, chosen: Plan) -> Contestant:
        """A pipeline that follows a plan."""
        program, task = self._own_program(), self.task
        pipe = Pipeline(
            program.model, devices=self.devices, program=program, plan=chosen, audit=UNAUDITED
        )
        self._stack.callback(pipe.close)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE)
        inner: list[float] = []

        def step() -> None:
            optimizer.zero_grad()
            start = time.perf_counter()
            pipe.train_step(*task.args, target=task.target, loss_fn=task.loss_fn, **task.kwargs)
            self._synchronize()
            inner.append(time.perf_counter() - start)
            optimizer.step()
            self._synchronize()

        facts = {
            "devices": list(self.devices),
            "threads": self.threads,
            "num_microbatches": chosen.num_microbatches,
            "microbatch_size": chosen.microbatch_size,
            "schedule": chosen.schedule,
            "cuts": list(chosen.cuts),
            "bound_seconds": chosen.bound_seconds,
            "predicted_seconds": chosen.predicted_step_seconds,
        }
        return Contestant(name, timed(step), facts, inner)

    def one_device(self, name: str, num_microbatches: int = 1) -> Contestant:
        """The first device alone: a worker like those of the pipelines, with as many threads."""
        return self._unsplit(name, num_microbatches, self.threads)

    def all_cores(self, name: str) -> Contestant:
        """One process that uses every core for each operation."""
        return self._unsplit(name, 1, len(os.sched_getaffinity(0)))

    def _unsplit(self, name: str, count: int, threads: int) -> Contestant:
        device, task = self._places[0], self.task
        model = self._own_program().model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        leaves, structure = flatten((task.args, task.kwargs))
        moved = [to_device(leaf, device) for leaf in leaves]
        batches = [
            unflatten(structure, x) for x in split(moved, self.program.varying.batch_dims, count)
        ]
        target = to_device(task.target, device)
        targets = [()] * count if target is None else [(t,) for t in target.tensor_split(count)]
        shares = [n / self.rows for n in split_rows(self.rows, count)]

        def step() -> None:
            optimizer.zero_grad()
            for (args, kwargs), labels, share in zip(batches, targets, shares, strict=True):
                loss = task.loss_fn(model(*args, **kwargs), *labels)
                (loss * share).backward()
            optimizer.step()
            self._synchronize()

        facts = {"devices": [str(device)], "threads": threads, "num_microbatches": count}
        return Contestant(name, timed(self._in_a_worker(device, threads, step)), facts)

    def _in_a_worker(
        self, device: torch.device, threads: int, step: Callable[[], None]
    ) -> Callable[[], Any]:
        workers = ThreadPool([device], threads, abort=_nothing, reset=_nothing)
        self._stack.callback(workers.close)
        return partial(workers.run, [step])

    def _own_program(self) -> Program:
        """The program; on GPUs that of a copy of the model, as each contestant places its own."""
        if self.on_cpu:
            return self.program
        return capture(copy.deepcopy(self.task.model), self.task.args, self.task.kwargs)

    def _synchronize(self) -> None:
        """Wait until GPUs have finished all work that was launched on them."""
        for place in dict.fromkeys(self._places):
            kind_of(place).synchronize(place)


def _nothing() -> None:
    """Do nothing: a worker on its own has no others to wake."""
