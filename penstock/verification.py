"""`verify`: exactness, proven on the user's own model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture import capture
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.randomness import generators_kept
from penstock.capture.trees import flatten
from penstock.engine.batch import Weight
from penstock.engine.batchnorm import BatchNormMode, closed_norms
from penstock.errors import InputError
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.plan.asked import Cut
from penstock.plan.request import Recompute
from penstock.profile.measure import Progress
from penstock.train.place import in_forward_order, place_of
from penstock.train.reference import Reference, call_loss, copied, gradients_of, run_with_threads
from penstock.train.report import Comparison, Place, VerifyReport, compare, compare_leaves
from penstock.workers.devices import threads_per_worker

_STEPS = 3
_RATE = 1e-3

T = TypeVar("T")


class Splitting(TypedDict, total=False):
    """How the model is to be split; each is as in `Pipeline`."""

    num_microbatches: int | Literal["auto"]
    schedule: str
    plan: Plan | str | os.PathLike[str] | None
    cuts: Sequence[Cut] | None
    recompute: Recompute
    memory_limit: int | str | None
    stages_per_worker: int | Literal["auto"]
    boundary_dtype: torch.dtype | None
    progress: Progress | None


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., torch.Tensor],
    devices: Sequence[str | torch.device],
    workers: Literal["threads", "processes"] = "threads",
    optimizer: type[Optimizer] = torch.optim.SGD,
    optimizer_options: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    weight: Weight = "rows",
    batchnorm: BatchNormMode = "microbatch",
    batch_dim: BatchDim = 0,
    dynamic: Dynamic | None = None,
    keep_closed: Iterable[str] = (),
    **splitting: Unpack[Splitting],
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
        args, kwargs: positional and keyword arguments of a batch.
        target, loss_fn, weight: as in `Pipeline.train_step`.
        devices, batch_dim, dynamic, keep_closed: as in `Pipeline`.
        workers: as in `Pipeline`; also under torchrun these, for they have all gradients in one
            place.
        optimizer: a class of `torch.optim`, or any that treats parameters one by one.
        optimizer_options: its arguments; `lr` is 0.001 if it is not among them.
        clip_norm: clip gradients to this norm before each of its steps.
        batchnorm: as in `Pipeline`; with `"deferred"`, one device puts running statistics off, too.
        **splitting: `num_microbatches`, `schedule`, `plan`, `cuts`, `recompute`, `memory_limit`,
            `stages_per_worker`, `boundary_dtype` and `progress`, as in `Pipeline`. One device
            rounds nothing, so a `boundary_dtype` makes a difference, and the report shows how much.

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
    theirs, named = copied(ours), dict(kwargs or {})
    closed = closed_norms(ours, batchnorm, keep_closed)
    options: dict[str, Any] = {"devices": devices, "workers": workers, "batchnorm": batchnorm}
    program = capture(ours, args, named, batch_dim=batch_dim, dynamic=dynamic, keep_closed=closed)
    with Pipeline(ours, args, named, program=program, **options, **splitting) as pipe:
        microbatches, deferred = pipe.plan.num_microbatches, batchnorm == "deferred"
        reference = Reference(theirs, program, microbatches, args, named, deferred)
        both = _Both(pipe, reference, training, args, named)
        comparisons = (*both.called(), *both.trained(), both.evaluated())
        place = _place(model, reference, pipe.plan, comparisons)
    subject = _subject(model, pipe.plan, training, workers, batchnorm)
    return VerifyReport(subject, comparisons, workers, place, pipe.plan.boundary_dtype)


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


def _subject(model: nn.Module, plan: Plan, training: Training, workers: str, batchnorm: str) -> str:
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
    if plan.boundary_dtype is not None:
        words.append(f"boundaries in {plan.boundary_dtype}")
    if batchnorm != "microbatch":
        words.append(f"BatchNorm {batchnorm}")
    if training.clip_norm is not None:
        words.append(f"gradients clipped to {training.clip_norm:g}")
    return ", ".join(words)


def _place(
    model: nn.Module, reference: Reference, plan: Plan, comparisons: Sequence[Comparison]
) -> Place | None:
    """Where something differs; `None` if nothing does, or it need be no more than rounding."""
    if all(comparison.ok for comparison in comparisons):
        return None
    place = place_of(copied(model), reference, plan, comparisons)
    rounding = plan.boundary_dtype is not None and place is not None and place.parameter is not None
    return None if rounding else place


@dataclass(frozen=True)
class _Both:
    """The pipeline and one device, which do the same, in the order in which it is compared."""

    pipe: Pipeline
    reference: Reference
    training: Training
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def called(self) -> list[Comparison]:
        """The plain style: call, loss, backward."""
        target, loss_fn = self.training.target, self.training.loss_fn
        output = self.pipe(*self.args, **self.kwargs)
        devices = [torch.device(device) for device in self.pipe.plan.devices]
        with generators_kept(devices):  # so that both losses draw the same
            loss = call_loss(loss_fn, output, target)
        loss.backward()
        expected = self._alone(partial(self.reference.call_and_backward, 0, loss_fn, target))
        return [
            compare_leaves("result of a call", flatten(output)[0], flatten(expected)[0]),
            self._gradients("gradients of backward()"),
        ]

    def trained(self) -> list[Comparison]:
        """The fast path, three steps with an optimizer."""
        training, model = self.training, self.reference.model
        mine = self.pipe.optimizer(training.optimizer, **training.arguments)
        other = training.optimizer(model.parameters(), **training.arguments)
        found, losses, norms = [], [], []
        for step in range(1, _STEPS + 1):
            mine.zero_grad()
            other.zero_grad()
            losses.append(self._step(step))
            if step == 1:
                found.append(self._gradients("gradients of train_step()"))
            if training.clip_norm is not None:
                ours = self.pipe.clip_grad_norm_(training.clip_norm)
                norms.append(
                    (ours, nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm))
                )
            mine.step()
            other.step()
        found.append(compare_leaves("losses", *zip(*losses, strict=True)))
        if norms:
            found.append(compare_leaves("norms of the gradients", *zip(*norms, strict=True)))
        for what, names in (("parameters", "named_parameters"), ("buffers", "named_buffers")):
            here, there = (dict(getattr(m, names)()) for m in (self.pipe.model, model))
            if there:
                found.append(compare(f"{what} after {_STEPS} steps", here, self._ordered(there)))
        return found

    def evaluated(self) -> Comparison:
        """A call in evaluation mode."""
        self.pipe.eval()
        self.reference.model.eval()
        with torch.no_grad():
            output = self.pipe(*self.args, **self.kwargs)
            expected = self._alone(partial(self.reference.call, _STEPS + 1))
        what = "result of a call in evaluation mode"
        return compare_leaves(what, flatten(output)[0], flatten(expected)[0])

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of a training step of both."""
        target, loss_fn, weight = self.training.target, self.training.loss_fn, self.training.weight
        given = {"target": target, "loss_fn": loss_fn, "weight": weight}
        ours = self.pipe.train_step(*self.args, **given, **self.kwargs)
        theirs = partial(self.reference.train_step, step, loss_fn, target, weight)
        return ours, self._alone(theirs)

    def _gradients(self, what: str) -> Comparison:
        return compare(what, gradients_of(self.pipe.model), self._ordered(self.reference.gradients))

    def _alone(self, function: Callable[[], Any]) -> Any:
        """With as many threads as a worker has."""
        return run_with_threads(function, threads_per_worker(self.pipe.plan.devices))

    def _ordered(self, named: Mapping[str, T]) -> dict[str, T]:
        return in_forward_order(self.pipe.program.train, named)
