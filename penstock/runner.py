"""Runs a plan: the stages of a program on their workers, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from penstock.capture import Key, Program, Ref
from penstock.capture.calls import ambient
from penstock.engine.batch import Batch
from penstock.engine.ends import Loss
from penstock.engine.stage import MicroBatch
from penstock.errors import InputError, WorkerError
from penstock.plan import Plan
from penstock.schedule import Event, Timeline
from penstock.train.backup import Backup
from penstock.workers.assembly import Assembly, Pass
from penstock.workers.threads import ThreadWorkers

Slices = list[list[Any]]
"""For every micro-batch the values that the first stage gets."""


class Runner:
    """The stages of a plan, on thread workers. The model's weights are where the plan wants them.

    Args:
        program: what is run.
        plan: how.
        devices: of the workers.
        threads: intra-op threads of each CPU worker.
        timeout: seconds that a pass may take.

    Attributes:
        assemblies: the stages, for training and for evaluation.
        workers: who runs them.
        loss_device: where the last stage is.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        devices: Sequence[torch.device],
        threads: int,
        timeout: float,
    ) -> None:
        training = Assembly(program, plan, devices, training=True)
        evaluation = training
        if not program.same_in_eval:
            evaluation = Assembly(program, plan, devices, training=False)
        self.assemblies = {True: training, False: evaluation}
        self.loss_device = devices[plan.placement[-1]]
        self._num_workers = len(devices)
        self._timeout = timeout
        self._steps = 0
        self._timelines: list[Timeline] | None = None
        self.workers = ThreadWorkers(devices, threads, self._abort, self._reset)

    def feed(self, assembly: Assembly, batch: Batch) -> tuple[list[MicroBatch], Slices]:
        """Hand the micro-batches to the first stage; returns them, and what of them it gets."""
        ways = [assembly.way_of(part) for part in batch.parts]
        slices = [
            [part[value.leaf] for value in assembly.ways[way].inputs if isinstance(value, Ref)]
            for part, way in zip(batch.parts, ways, strict=True)
        ]
        assembly.feed.values = [tuple(part) for part in slices]
        keys = self._keys(len(batch))
        return [MicroBatch(*each) for each in zip(batch.sizes, keys, ways, strict=True)], slices

    def train(
        self, assembly: Assembly, batch: Batch, loss: Loss
    ) -> tuple[torch.Tensor, Slices, dict[int, Any]]:
        """Forward and backward of a batch, interleaved.

        Returns:
            the weighted loss of the batch, what the first stage got, and the gradients of that.
        """
        microbatches, slices = self.feed(assembly, batch)
        assembly.outlet.take_losses(loss)
        try:
            self.run(assembly, "train", microbatches)
            losses, gradients = assembly.outlet.losses, assembly.feed.gradients
        finally:
            assembly.clear()
        total = losses[0] * loss.weights[0]
        for microbatch in range(1, len(batch)):
            total = total + losses[microbatch] * loss.weights[microbatch]
        return total, slices, gradients

    def run(self, assembly: Assembly, what: Pass, microbatches: Sequence[MicroBatch]) -> None:
        """Run one pass on all workers; if it fails, gradients and buffers are put back."""
        events: list[Event] | None = None if self._timelines is None else []
        jobs: Sequence[Callable[[], Any]] = assembly.jobs(what, microbatches, ambient(), events)
        backups: dict[int, Backup] = {}
        jobs = [
            partial(_with_backup, job, backups, worker, assembly, what in ("train", "backward"))
            for worker, job in enumerate(jobs)
        ]
        try:
            self.workers.run(jobs, self._timeout)
        except BaseException as error:
            for backup in backups.values():
                backup.restore()
            if isinstance(error, WorkerError) and isinstance(error.__cause__, InputError):
                raise error.__cause__ from None  # the user's loss, not the pipeline, is at fault
            raise
        if self._timelines is not None and events:
            start = min(event.start for event in events)
            moved = [e._replace(start=e.start - start, end=e.end - start) for e in events]
            self._timelines.append(Timeline(self._num_workers, moved))

    def _keys(self, count: int) -> list[Key]:
        """The random keys of the next step; `torch.manual_seed` is what seeds them."""
        step, self._steps = self._steps, self._steps + 1
        return [Key(torch.initial_seed(), step, microbatch) for microbatch in range(count)]

    @contextmanager
    def recording(self) -> Iterator[list[Timeline]]:
        """While open, every pass appends its measured timeline to the list that this gives."""
        timelines: list[Timeline] = []
        self._timelines = timelines
        try:
            yield timelines
        finally:
            self._timelines = None

    def close(self) -> None:
        """Dismiss the workers."""
        self.workers.close()
        self.workers.join(5.0)

    def _abort(self) -> None:
        for assembly in self.assemblies.values():
            assembly.abort()

    def _reset(self) -> None:
        for assembly in self.assemblies.values():
            assembly.reset()


def _with_backup(
    job: Callable[[], None],
    backups: dict[int, Backup],
    worker: int,
    assembly: Assembly,
    backward: bool,
) -> None:
    parameters = assembly.parameters[worker] if backward else ()
    backups[worker] = Backup(parameters, assembly.changing[worker])
    job()
