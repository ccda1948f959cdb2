"""`verify`: exactness, proven on the user's own model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import msgspec
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from penstock.capture import Program, capture
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.randomness import generators_kept
from penstock.comparison.place import in_forward_order, place_of
from penstock.comparison.reference import (
    call_loss,
    copied,
    gradients_of,
    one_device,
    run_with_threads,
)
from penstock.comparison.rows import rows_in_order
from penstock.comparison.verify_report import (
    Comparison,
    Place,
    VerifyReport,
    compare,
    compare_leaves,
    compare_results,
)
from penstock.devices.choice import Devices, threads_per_worker
from penstock.engine.batch import Weight
from penstock.engine.batchnorm import BatchNormMode, closed_norms
from penstock.errors import InputError
from penstock.oracle import Oracle, tensors
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.plan.by_name import Cut
from penstock.plan.request import Recompute
from penstock.profile.measure import Progress

_STEPS = 3
_LEAST = 3  # micro-batches: fewer show little of how they add up, and of what is between them
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
    devices: Devices,
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

    The unsplit one is the user's own model, called by a loop of plain PyTorch over the same
    micro-batches (`penstock.oracle`), with the same intra-op threads, its random calls seeded as
    the pipeline seeds them. Compared are the result of a call, the gradients of `loss.backward()`
    through it, losses, gradients, buffers and parameters over three `train_step`s with an
    optimizer, and the result of a call in evaluation mode. The last of the steps has a row fewer
    where the batch would divide into micro-batches evenly.

    Results are put together as the unsplit model gives them for the whole batch: in its structure
    and shapes, every row bit for bit that of its micro-batch. Kernels round differently for other
    numbers of rows, so that a row is where it belongs is shown in evaluation mode, by none of the
    unsplit model's other rows being nearer to it than its own.

    Where something differs, the calls of the program are compared with those of the user's forward
    one by one, to find the first that gives something else. The user's model is not touched.

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
        **splitting: `num_microbatches` (if it is not given, at least three, also where a plan
            has fewer), `schedule`, `plan`, `cuts`, `recompute`, `memory_limit`,
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
    # What an audit, or a result that cannot be put together, would raise is to be reported.
    options |= {"audit": None, "merge": "rows"}
    program = capture(ours, args, named, batch_dim=batch_dim, dynamic=dynamic, keep_closed=closed)
    with Pipeline(ours, args, named, program=program, **options, **splitting) as pipe:
        if splitting.get("num_microbatches", "auto") == "auto":
            pipe.plan = pipe._passes.plan = _in_several(pipe.plan)
        count, deferred = pipe.plan.num_microbatches, batchnorm == "deferred"
        oracle = one_device(
            theirs, program, count, args, named, batch_dim=batch_dim, deferred=deferred
        )
        both = _Both(pipe, oracle, training)
        comparisons = (*both.called(), *both.trained(), *both.evaluated())
        place = _place(model, program, oracle, pipe.plan, comparisons)
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
        """Keyword arguments for the optimizer: the learning rate and the options."""
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


def _in_several(plan: Plan) -> Plan:
    """The same plan, for three micro-batches if it has fewer and there are as many rows."""
    count = max(plan.num_microbatches, min(_LEAST, plan.batch_size))
    return msgspec.structs.replace(plan, num_microbatches=count)


def _place(
    model: nn.Module,
    program: Program,
    oracle: Oracle,
    plan: Plan,
    comparisons: Sequence[Comparison],
) -> Place | None:
    """Where something differs; `None` if nothing does, or it need be no more than rounding."""
    if all(comparison.ok for comparison in comparisons):
        return None
    place = place_of(copied(model), program, oracle, plan, comparisons)
    rounding = plan.boundary_dtype is not None and place is not None and place.parameter is not None
    return None if rounding else place


@dataclass(frozen=True)
class _Both:
    """The pipeline and one device, which do the same, in the order in which it is compared."""

    pipe: Pipeline
    oracle: Oracle
    training: Training

    def called(self) -> list[Comparison]:
        """The plain style: call, loss, backward."""
        target, loss_fn = self.training.target, self.training.loss_fn
        args, kwargs = self.oracle.batch
        output = self.pipe(*args, **kwargs)
        devices = [torch.device(device) for device in self.pipe.plan.devices]
        with generators_kept(devices):  # so that both losses draw the same
            loss = call_loss(loss_fn, output, target)
        loss.backward()
        work = partial(self.oracle.call_and_backward, 0, loss_fn, target)
        return [
            self._result("result of a call", output, work),
            self._gradients("gradients of backward()"),
        ]

    def _result(self, what: str, output: Any, work: Callable[[], Any]) -> Comparison:
        """Compare a result of the pipeline, which is of several micro-batches."""
        trace = self.pipe.program.trace(self.pipe.training)
        why = [join.why for join in trace.joins if join.why and len(self.oracle.rows) > 1]
        try:
            expected = self._alone(work)
        except ValueError as error:
            why.append(str(error))
        if why:
            return Comparison(f"{what} ({why[0]})", len(tensors(output)), ("all",), float("inf"))
        return compare_results(what, output, expected)

    def trained(self) -> list[Comparison]:
        """The fast path, three steps with an optimizer."""
        training, model = self.training, self.oracle.model
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

    def evaluated(self) -> list[Comparison]:
        """A call in evaluation mode."""
        self.pipe.eval()
        self.oracle.model.eval()
        args, kwargs = self.oracle.batch
        with torch.no_grad():
            output = self.pipe(*args, **kwargs)
            what = "result of a call in evaluation mode"
            found = self._result(what, output, partial(self.oracle.call, -1))  # it trains nothing
            if len(self.oracle.rows) == 1 or not found.ok or self._goes_several_ways():
                return [found]
            return [found, rows_in_order(output, self._alone(self.oracle.unsplit))]

    def _goes_several_ways(self) -> bool:
        """Whether the model decides otherwise on the batch than on some micro-batch of it.

        Then its rows depend on each other, and need not be those that it gives for the batch.
        """
        program = self.pipe.program
        inputs = [self.oracle.batch, *self.oracle.microbatches]
        traces = {id(program.trace_for(program.flatten_inputs(*i), False)) for i in inputs}
        return len(traces) > 1

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of a training step of both."""
        oracle, target = self.oracle, self.training.target
        if step == _STEPS and self._can_be_uneven():
            oracle, target = oracle.without_last_row(target)
        loss_fn, weight = self.training.loss_fn, self.training.weight
        args, kwargs = oracle.batch
        ours = self.pipe.train_step(*args, target=target, loss_fn=loss_fn, weight=weight, **kwargs)
        return ours, self._alone(partial(oracle.train_step, step, loss_fn, target, weight))

    def _can_be_uneven(self) -> bool:
        """Whether the batch divides evenly, and does not with a row fewer.

        Some normalisations refuse a micro-batch of one row, so that is left out with them.
        """
        least, most = min(self.oracle.rows), max(self.oracle.rows)
        norms = any(isinstance(module, _NormBase) for module in self.oracle.model.modules())
        return least == most > (2 if norms else 1) and len(self.oracle.rows) > 1

    def _gradients(self, what: str) -> Comparison:
        return compare(what, gradients_of(self.pipe.model), self._ordered(self.oracle.gradients))

    def _alone(self, function: Callable[[], Any]) -> Any:
        """With as many threads as a worker has."""
        return run_with_threads(function, threads_per_worker(self.pipe.plan.devices))

    def _ordered(self, named: Mapping[str, T]) -> dict[str, T]:
        return in_forward_order(self.pipe.program.train, named)
