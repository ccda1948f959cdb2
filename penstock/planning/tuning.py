"""Measuring plans: the same batch through several of them, in turn, on a copy of the model.

Plans for training are measured by training steps, plans for inference by a flow of forwards.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from penstock.capture import Program, Sizes
from penstock.capture.preserve import buffers_kept, objects_kept, without_gradients
from penstock.capture.randomness import generators_kept
from penstock.capture.trees import flatten_result
from penstock.devices.choice import threads_per_worker
from penstock.display.terminal import Progress
from penstock.engine.batch import Batch
from penstock.engine.ends import Loss
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.profile.shadow import shadow
from penstock.runner import Runner, Started
from penstock.workers.backend import timeout_of
from penstock.workers.gate import gate_of
from penstock.workers.placement import place
from penstock.workers.threads.workers import ThreadWorkers, runs_in_caller

_ROUNDS = 2
_WARM_UPS, _STEPS = 2, 3  # of a plan in a row
_FLOWING = 8  # batches of a flow in a row, besides those that fill the stages


def measured(
    program: Program,
    leaves: Sequence[Any],
    plans: Sequence[Plan],
    *,
    rounds: int = _ROUNDS,
    progress: Progress | None = None,
) -> list[list[float]]:
    """The seconds of `train_step`s with every plan, without the optimizer: one list per plan.

    For plans for inference these are the seconds from one batch to the next in a steady flow: one
    number for each round, the mean over some batches.

    The plans take turns, so that a disturbance affects all of them. Each turn has a few steps, as
    memory that another plan has used is slow at first. The model's weights are read, and its
    gradients, buffers and random numbers are left alone.

    Args:
        program: what is run.
        leaves: of the inputs of a batch.
        plans: each for devices that exist.
        rounds: how often each has its turn.
        progress: called as it goes on.

    Raises:
        PlanError: the model has no weights, so that it cannot be run.
    """
    if any(parameter.is_meta for parameter in program.model.parameters()):
        raise PlanError("plans cannot be measured on a model without weights; leave out tune")
    taken: list[list[float]] = [[] for _ in plans]
    twin = copy.copy(program)
    devices = [torch.device(name) for name in dict.fromkeys(n for p in plans for n in p.devices)]
    with (
        objects_kept(program.model.modules()),
        generators_kept(devices),
        # a forward may be a closure that knows the user's modules
        buffers_kept(program.model, program.train.changed),
        without_gradients(program.model.parameters()),
    ):
        twin.model = shadow(program.model, devices[0], program.written)
        if all(plan.inference for plan in plans):
            twin.model.eval()
        for turn in range(rounds):
            for number, plan in enumerate(plans):
                if progress:
                    done = turn * len(plans) + number
                    what = f"{len(plan.stages)} stages" if plan.inference else plan.schedule
                    progress(done, rounds * len(plans), f"measuring {what}")
                taken[number] += _times(twin, leaves, plan)
    return taken


def _times(program: Program, leaves: Sequence[Any], plan: Plan) -> list[float]:
    """The seconds of some steps in a row, or from batch to batch in a flow."""
    devices = [torch.device(name) for name in plan.devices]
    place(program, plan.cuts, [devices[worker] for worker in plan.placement])
    timeout = timeout_of(plan, None)
    threads = plan.threads or threads_per_worker(devices)
    gate, in_caller = gate_of(program.model), runs_in_caller(devices)
    workers = ThreadWorkers(plan, devices, threads, timeout, gate, in_caller)
    runner = Runner(program, plan, workers)
    batch = Batch.split(program.signatures.inputs(leaves), plan.num_microbatches)
    with closing(runner):
        return [_flow(runner, batch)] if plan.inference else _steps(runner, batch, program)


def _steps(runner: Runner, batch: Batch, program: Program) -> list[float]:
    """The seconds of some training steps in a row."""
    shares = [rows / sum(batch.rows) for rows in batch.rows]
    loss = Loss(mean_square, [()] * len(batch), shares)
    taken = []
    for _ in range(_WARM_UPS + _STEPS):
        program.model.zero_grad()
        start = time.perf_counter()
        runner.run(runner.order("train", batch, True, loss))
        taken.append(time.perf_counter() - start)
    return taken[_WARM_UPS:]


def _flow(runner: Runner, batch: Batch) -> float:
    """The seconds from batch to batch, with as many under way as `Pipeline.map` has."""
    under_way: deque[Started] = deque()
    ends = []
    numbers = [runner.ways(training=False).numbers(0, part) for part in batch.parts]
    sizes: list[Sizes] = [{**own, **more} for own, more in zip(batch.sizes, numbers, strict=True)]
    # By the recording in evaluation mode; the user's model may be in training mode.
    batch = replace(batch, ways=[0] * len(batch), sizes=sizes)

    def finish() -> None:
        runner.finish(under_way.popleft())
        ends.append(time.perf_counter())

    most = runner.plan.batches_under_way
    with torch.no_grad(), runner.given_up():
        for number in range(most + _FLOWING):
            while len(under_way) >= most:
                finish()
            numbered = replace(batch, number=number, step=-1 - number)
            under_way.append(runner.start(runner.order("infer", numbered, training=False)))
        while under_way:
            finish()
    first, last = ends[most - 1], ends[-1]
    return (last - first) / _FLOWING


def mean_square(output: Any) -> torch.Tensor:
    """The mean of the squares of every floating point tensor in the output, added up.

    A loss for models that come without one.
    """
    parts = [
        leaf.square().mean()
        for leaf in flatten_result(output)[0]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return torch.stack(parts).sum()
