"""`verify`: exactness, proven on the user's own model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture import capture
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.trees import flatten
from penstock.engine.batch import Weight
from penstock.errors import InputError
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.plan.asked import Cut
from penstock.plan.request import Recompute
from penstock.profile.measure import Progress
from penstock.train.place import in_forward_order, place_of
from penstock.train.reference import Reference, call_loss, copied, gradients_of, run_with_threads
from penstock.train.report import Comparison, VerifyReport, compare, compare_leaves
from penstock.workers.devices import threads_per_worker

_STEPS = 3
_RATE = 1e-3


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., torch.Tensor],
    devices: Sequence[str | torch.device],
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    cuts: Sequence[Cut] | None = None,
    recompute: Recompute = "auto",
    memory_limit: int | str | None = None,
    stages_per_worker: int | Literal["auto"] = "auto",
    workers: Literal["threads", "processes"] = "threads",
    optimizer: type[Optimizer] = torch.optim.SGD,
    optimizer_options: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    weight: Weight = "rows",
    batch_dim: BatchDim = 0,
    dynamic: Dynamic | None = None,
    keep_closed: Iterable[str] = (),
    progress: Progress | None = None,
) -> VerifyReport:
    """Train copies of the model split and unsplit, and compare them bit for bit.

    The unsplit one is the user's own forward, run by one device on the same micro-batches, one
    after the other, with the same intra-op threads, its random calls seeded as the pipeline seeds
    them. Compared are the result of a call, the gradients of `loss.backward()` through it, losses,
    gradients, buffers and parameters over three `train_step`s with an optimizer, and the result of
    a call in evaluation mode. Where something differs, the calls of the program are compared with
    those of the user's forward one by one, to find the first that gives something else. The user's
    model is not touched.

    Args:
        model: any module that can be copied by `copy.deepcopy`.
        args: positional arguments of a batch.
        kwargs: keyword arguments of a batch.
        target: as in `Pipeline.train_step`.
        loss_fn: as in `Pipeline.train_step`.
        devices: as in `Pipeline`.
        num_microbatches: as in `Pipeline`.
        schedule: as in `Pipeline`.
        plan: as in `Pipeline`.
        cuts: as in `Pipeline`.
        recompute: as in `Pipeline`.
        memory_limit: as in `Pipeline`.
        stages_per_worker: as in `Pipeline`.
        workers: as in `Pipeline`; also under torchrun these, for they have all gradients in one
            place.
        optimizer: a class of `torch.optim`, or any that treats parameters one by one.
        optimizer_options: its arguments; `lr` is 0.001 if it is not among them.
        clip_norm: clip gradients to this norm before each of its steps.
        weight: as in `Pipeline.train_step`.
        batch_dim: as in `Pipeline`.
        dynamic: as in `Pipeline`.
        keep_closed: as in `Pipeline`.
        progress: as in `Pipeline`.

    Returns:
        a report; `report.ok` is whether everything is equal, `str(report)` says what was compared.

    Raises:
        InputError: the optimizer is none, or cannot be divided among workers.
        PenstockError: the pipeline cannot be built, or a step fails.
    """
    training = Training(target, loss_fn, weight, optimizer, optimizer_options or {}, clip_norm)
    ours = copied(model)
    if not ours.training:  # else submodules that the user froze in evaluation mode stay so
        ours.train()
    theirs = copied(ours)
    program = capture(
        ours, args, kwargs, batch_dim=batch_dim, dynamic=dynamic, keep_closed=keep_closed
    )
    pipe = Pipeline(
        ours,
        args,
        kwargs,
        devices=devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        plan=plan,
        cuts=cuts,
        recompute=recompute,
        memory_limit=memory_limit,
        stages_per_worker=stages_per_worker,
        workers=workers,
        program=program,
        progress=progress,
    )
    with closing(pipe):
        reference = Reference(theirs, program, pipe.plan.num_microbatches, args, kwargs or {})
        comparisons = _compare(pipe, reference, training, args, dict(kwargs or {}))
        place = None
        if not all(comparison.ok for comparison in comparisons):
            place = place_of(copied(model), reference, pipe.plan, comparisons)
    return VerifyReport(_subject(model, pipe.plan, training, workers), comparisons, workers, place)


@dataclass(frozen=True)
class Training:
    """What a step is made of, for the pipeline and for one device alike."""

    target: Any
    loss_fn: Callable[..., torch.Tensor]
    weight: Weight = "rows"
    optimizer: type[Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer)):
            raise InputError(
                f"optimizer={self.optimizer!r} is no class of optimizers; give torch.optim.AdamW "
                "and its arguments in optimizer_options"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm={self.clip_norm!r} is no norm; give one above 0, or None")

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the optimizer."""
        return {"lr": _RATE, **self.options}


def _subject(model: nn.Module, plan: Plan, training: Training, workers: str) -> str:
    """What is verified, in words."""
    words = [
        f"{type(model).__name__} in {len(plan.stages)} stages",
        f"{plan.num_microbatches} micro-batches",
        plan.schedule,
        f"workers={workers}",
        training.optimizer.__name__,
    ]
    recomputed = sum(bool(stage.recompute) for stage in plan.stages)
    if recomputed:
        words.append(f"recomputing in {recomputed} of them")
    if training.clip_norm is not None:
        words.append(f"gradients clipped to {training.clip_norm:g}")
    return ", ".join(words)


def _compare(
    pipe: Pipeline,
    reference: Reference,
    training: Training,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Comparison, ...]:
    """Everything that is compared, in the order in which it happens."""
    alone = partial(run_with_threads, threads=threads_per_worker(pipe.plan.devices))
    ordered = partial(in_forward_order, pipe.program.train)
    target, loss_fn = training.target, training.loss_fn

    # The plain style: call, loss, backward.
    output = pipe(*args, **kwargs)
    call_loss(loss_fn, output, target).backward()
    expected = alone(partial(reference.call_and_backward, 0, loss_fn, target))
    found = [compare_leaves("result of a call", flatten(output)[0], flatten(expected)[0])]
    what = "gradients of backward()"
    found.append(compare(what, gradients_of(pipe.model), ordered(reference.gradients)))

    # The fast path, three steps with an optimizer.
    mine = pipe.optimizer(training.optimizer, **training.arguments)
    other = training.optimizer(reference.model.parameters(), **training.arguments)
    losses: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for step in range(1, _STEPS + 1):
        mine.zero_grad()
        other.zero_grad()
        ours = pipe.train_step(
            *args, target=target, loss_fn=loss_fn, weight=training.weight, **kwargs
        )
        losses[0].append(ours)
        losses[1].append(
            alone(partial(reference.train_step, step, loss_fn, target, training.weight))
        )
        if step == 1:
            what = "gradients of train_step()"
            found.append(compare(what, gradients_of(pipe.model), ordered(reference.gradients)))
        if training.clip_norm is not None:
            norms[0].append(pipe.clip_grad_norm_(training.clip_norm))
            theirs = reference.model.parameters()
            norms[1].append(nn.utils.clip_grad_norm_(theirs, training.clip_norm))
        mine.step()
        other.step()
    found.append(compare_leaves("losses", *losses))
    if training.clip_norm is not None:
        found.append(compare_leaves("norms of the gradients", *norms))
    for what, names in (("parameters", "named_parameters"), ("buffers", "named_buffers")):
        here, there = dict(getattr(pipe.model, names)()), dict(getattr(reference.model, names)())
        if there:
            found.append(compare(f"{what} after {_STEPS} steps", here, ordered(there)))

    # Evaluation.
    pipe.eval()
    reference.model.eval()
    with torch.no_grad():
        output = pipe(*args, **kwargs)
        expected = alone(partial(reference.call, _STEPS + 1))
    what = "result of a call in evaluation mode"
    return (*found, compare_leaves(what, flatten(output)[0], flatten(expected)[0]))
