"""Measuring plans: the same batch through several of them, in turn, on a copy of the model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from penstock.capture import Program
from penstock.capture.preserve import own_generators_kept
from penstock.capture.randomness import generators_kept
from penstock.capture.trees import flatten
from penstock.engine.batch import Batch
from penstock.engine.ends import Loss
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.profile.measure import Progress
from penstock.profile.shadow import shadow
from penstock.runner import Runner
from penstock.workers.devices import threads_per_worker
from penstock.workers.placement import place

_ROUNDS = 5
_TIMEOUTS = 50  # times what was predicted


def measured(
    program: Program,
    leaves: Sequence[Any],
    plans: Sequence[Plan],
    devices: Sequence[torch.device],
    *,
    rounds: int = _ROUNDS,
    progress: Progress | None = None,
) -> list[list[float]]:
    """The seconds of `train_step`s with every plan, without the optimizer.

    The plans take turns, so that what disturbs one disturbs all. The model's weights are read, and
    its gradients, buffers and random numbers are left alone.

    Args:
        program: what is run.
        leaves: of the inputs of a batch.
        plans: for as many devices as there are.
        devices: of the workers.
        rounds: how often each is measured, after one that does not count.
        progress: called as it goes on.

    Raises:
        PlanError: the model has no weights, so that it cannot be run.
    """
    with ExitStack() as stack:
        stack.enter_context(own_generators_kept(program.model.modules()))
        stack.enter_context(generators_kept(devices))
        steps = [_prepared(program, leaves, plan, devices, stack) for plan in plans]
        taken: list[list[float]] = [[] for _ in plans]
        for turn in range(rounds + 1):
            for number, step in enumerate(steps):
                if progress:
                    what = f"measuring {plans[number].schedule}"
                    progress(turn * len(steps) + number, (rounds + 1) * len(steps), what)
                start = time.perf_counter()
                step()
                taken[number].append(time.perf_counter() - start)
        return [seconds[1:] for seconds in taken]


def _prepared(
    program: Program,
    leaves: Sequence[Any],
    plan: Plan,
    devices: Sequence[torch.device],
    stack: ExitStack,
) -> Callable[[], None]:
    """A step of the plan on a shadow of the model."""
    if any(parameter.is_meta for parameter in program.model.parameters()):
        raise PlanError("plans cannot be measured on a model without weights; leave out tune")
    twin = copy.copy(program)
    twin.model = shadow(program.model, devices[0], program.written)
    place(twin, plan.cuts, [devices[worker] for worker in plan.placement])
    timeout = max(60.0, _TIMEOUTS * plan.predicted_step_seconds)
    runner = Runner(twin, plan, devices, threads_per_worker(devices), timeout)
    stack.callback(runner.close)
    batch = Batch.split(twin, leaves, plan.num_microbatches)
    shares = [rows / sum(batch.rows) for rows in batch.rows]
    loss = Loss(mean_square, [()] * len(batch), shares)

    def step() -> None:
        runner.train(runner.assemblies[True], batch, loss)

    return step


def mean_square(output: Any) -> torch.Tensor:
    """The mean of the squares of every floating point tensor in the output, added up.

    A loss for models that come without one.
    """
    parts = [
        leaf.square().mean()
        for leaf in flatten(output)[0]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return torch.stack(parts).sum()
