"""`verify`: compares the split with the unsplit model, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture import capture
from penstock.capture.dims import BatchDim, Dynamic, as_given, positional_names
from penstock.capture.randomness import generators_kept
from penstock.comparison.compare import (
    Comparison,
    VerifyReport,
    compare,
    compare_leaves,
    compare_results,
    in_forward_order,
    place_of,
    rows_in_order,
)
from penstock.comparison.reference import (
    call_loss,
    copied,
    gradients_of,
    is_deterministic,
    one_device,
    run_with_threads,
)
from penstock.devices.choice import Devices
from penstock.display.terminal import Progress
from penstock.engine.batch import Weight
from penstock.engine.batchnorm import BatchNormMode, closed_batchnorms
from penstock.engine.whole_batch import WholeBatch
from penstock.errors import InputError
from penstock.generation.seeds import seed_of
from penstock.oracle import Oracle, generated, tensors
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.plan.request import Cut, Recompute
from penstock.torch_internals import NormBase

_STEPS = 3
_LEAST = 3  # micro-batches: fewer show little of how they add up, and of what is between them
_RATE = 1e-3

T = TypeVar("T")


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Callable[..., torch.Tensor],
    devices: Devices | None = None,
    workers: Literal["threads", "processes"] = "threads",
    optimizer: type[Optimizer] = torch.optim.SGD,
    optimizer_options: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    weight: Weight = "rows",
    batchnorm: BatchNormMode = "microbatch",
    batch_dim: BatchDim = 0,
    dynamic: Dynamic | None = None,
    keep_closed: Iterable[str] = (),
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    cuts: Sequence[Cut] | None = None,
    recompute: Recompute = "auto",
    memory_limit: int | str | None = None,
    stages_per_worker: int | Literal["auto"] = "auto",
    boundary_dtype: torch.dtype | None = None,
    replicas: int | Literal["auto"] = "auto",
    generate: Mapping[str, Any] | None = None,
    progress: Progress | Literal["auto"] | None = "auto",
) -> VerifyReport:
    """Train copies of the model split and unsplit, and compare them bit for bit.

    The reference is the unsplit model, called by a loop of plain PyTorch over the same
    micro-batches (`penstock.oracle`), with the same number of intra-op threads and with its random
    calls seeded as in the pipeline. These are compared: the result of a call; the gradients of
    `loss.backward()` through it; losses, gradients, buffers and parameters over three
    `train_step`s with an optimizer; the result of a call in evaluation mode. If the batch divides
    evenly into micro-batches, the last step has one row fewer.

    The result of a call must have the structure and shapes that the unsplit model returns for the
    whole batch, and every row must be bitwise that of its micro-batch. Kernels round differently
    for other numbers of rows. So in evaluation mode the rows are also compared with those of the
    unsplit model: no other row of its result may be nearer to a row than the row at the same place.

    If something differs, the calls of the program are compared with those of the user's forward one
    by one to find the first difference. The user's model is not modified.

    Args:
        model: any module that can be copied by `copy.deepcopy`.
        args, kwargs: positional and keyword arguments of a batch.
        target, loss_fn, weight: as in `Pipeline.train_step`.
        devices, batch_dim, dynamic, keep_closed: as in `Pipeline`.
        workers: `"threads"` or `"processes"`, under torchrun too, because these have all gradients
            in one process.
        optimizer: a class of `torch.optim`, or another that treats parameters one by one.
        optimizer_options: arguments of the optimizer; the default `lr` is 0.001.
        clip_norm: clip gradients to this norm before each optimizer step.
        batchnorm: as in `Pipeline`; the reference does the same.
        num_microbatches: as in `Pipeline`; `"auto"` is at least three, even if the plan has fewer.
        schedule, plan, cuts, recompute, memory_limit, stages_per_worker, replicas, progress: as in
            `Pipeline`.
        generate: keyword arguments of `Pipeline.generate`, whose tokens are compared as well, in
            evaluation mode: with those of the unsplit model's own `generate`, group by group.
        boundary_dtype: as in `Pipeline`. The reference does not round, so the report shows how much
            the rounding changes.

    Returns:
        a report: `report.ok` is whether everything is equal, `str(report)` lists what was compared.

    Raises:
        InputError: `optimizer` is not an optimizer class, or cannot be divided among workers.
        PenstockError: the pipeline cannot be built, or a step fails.
    """
    training = _Step(target, loss_fn, weight, optimizer, optimizer_options or {}, clip_norm)
    ours = copied(model)
    if not ours.training:  # else submodules that the user froze in evaluation mode stay so
        ours.train()
    theirs, named = copied(ours), dict(kwargs or {})
    closed = closed_batchnorms(ours, batchnorm, keep_closed)
    program = capture(ours, args, named, batch_dim=batch_dim, dynamic=dynamic, keep_closed=closed)
    with Pipeline(
        ours,
        args,
        named,
        program=program,
        devices=devices,
        workers=workers,
        batchnorm=batchnorm,
        num_microbatches=num_microbatches,
        schedule=schedule,
        plan=plan,
        cuts=cuts,
        recompute=recompute,
        memory_limit=memory_limit,
        stages_per_worker=stages_per_worker,
        boundary_dtype=boundary_dtype,
        replicas=replicas,
        progress=progress,
        audit=None,  # what it would raise is to be reported
        merge="rows",  # the same of results that cannot be put together
    ) as pipe:
        if num_microbatches == "auto":
            few = min(_LEAST, pipe.plan.batch_size)
            pipe._running.split_into(max(pipe.plan.num_microbatches, few))
        count, deferred = pipe.plan.num_microbatches, batchnorm == "deferred"
        if not isinstance(batch_dim, int):
            batch_dim = as_given(batch_dim, positional_names(theirs), len(args))
        oracle = one_device(
            theirs, program, count, args, named, batch_dim=batch_dim, deferred=deferred
        )
        both = _Both(pipe, oracle, training)
        comparisons = (*both.called(), *both.trained(), *both.evaluated())
        if generate is not None:
            comparisons = (*comparisons, both.generated(generate))
        place = place_of(model, program, oracle, pipe.plan, pipe.threads_per_worker, comparisons)
    subject = _subject(model, pipe.plan, training, workers, batchnorm)
    repeats = is_deterministic(pipe.plan.devices, pipe.threads_per_worker)
    return VerifyReport(subject, comparisons, workers, place, pipe.plan.boundary_dtype, repeats)


@dataclass(frozen=True)
class _Step:
    """The arguments of a training step, for the pipeline and the reference."""

    target: Any
    loss_fn: Callable[..., torch.Tensor]
    weight: Weight = "rows"
    optimizer: type[Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer)):
            raise InputError(
                f"optimizer={self.optimizer!r} is not an optimizer class; give a class such as "
                "torch.optim.AdamW, and its arguments in optimizer_options"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm={self.clip_norm!r} must be greater than 0, or None")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer: the learning rate and the options."""
        return {"lr": _RATE, **self.options}


def _subject(model: nn.Module, plan: Plan, training: _Step, workers: str, batchnorm: str) -> str:
    """The model, its plan and the training step, as the first line of a report has them."""
    words = [
        f"{type(model).__name__} in {_counted(len(plan.stages), 'stage')}",
        f"{plan.num_microbatches} micro-batches",
        plan.schedule,
        f"workers={workers}",
        training.optimizer.__name__,
    ]
    recomputed = sum(bool(stage.recompute) for stage in plan.stages)
    if plan.replicas > 1:
        words.insert(1, f"{plan.replicas} replicas")
    if recomputed:
        words.append(f"recomputing in {recomputed} of them")
    if plan.boundary_dtype is not None:
        words.append(f"boundaries in {plan.boundary_dtype}")
    if batchnorm != "microbatch":
        words.append(f"BatchNorm {batchnorm}")
    if training.clip_norm is not None:
        words.append(f"gradients clipped to {training.clip_norm:g}")
    return ", ".join(words)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


@dataclass(frozen=True)
class _Both:
    """The pipeline and the reference, which run the same steps; methods in order of comparison."""

    pipe: Pipeline
    oracle: Oracle
    training: _Step

    def called(self) -> list[Comparison]:
        """Compare a call, and `loss.backward()` through it."""
        target, loss_fn = self.training.target, self.training.loss_fn
        args, kwargs = self.oracle.batch
        output = self.pipe(*args, **kwargs)
        devices = [torch.device(device) for device in self.pipe.plan.devices]
        with generators_kept(devices):  # so that both losses draw the same
            loss = call_loss(loss_fn, output, target)
        loss.backward()
        oracle = self.oracle
        return [
            self._result(
                "result of a call",
                output,
                lambda: oracle.call_and_backward(0, loss_fn, target),
            ),
            self._gradients("gradients of backward()"),
        ]

    def _result(self, what: str, output: Any, work: Callable[[], Any]) -> Comparison:
        """Compare a result that the pipeline puts together from micro-batches."""
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
        """Compare three `train_step`s with an optimizer."""
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
        """Compare a call in evaluation mode."""
        self.pipe.eval()
        self.oracle.model.eval()
        args, kwargs = self.oracle.batch
        with torch.no_grad():
            output = self.pipe(*args, **kwargs)
            what = "result of a call in evaluation mode"
            found = self._result(what, output, lambda: self.oracle.call(-1))  # it trains nothing
            if len(self.oracle.rows) == 1 or not found.ok or self._goes_several_ways():
                return [found]
            return [found, rows_in_order(output, self._alone(self.oracle.unsplit))]

    def generated(self, options: Mapping[str, Any]) -> Comparison:
        """Compare the tokens of `generate`, in evaluation mode."""
        named = dict(options)
        size, seed = named.pop("group_size", None), named.pop("seed", None) or 0
        rowwise, in_flight = named.pop("rowwise", False), named.pop("in_flight", None)
        named.pop("stream", None)  # the tokens are the same
        rows = next(len(v) for v in named.values() if isinstance(v, torch.Tensor) and v.ndim)
        plan = self.pipe.plan
        count = min(rows, len(plan.stages) * plan.replicas)
        sizes = [rows // count + (k < rows % count) for k in range(count)]
        if rowwise or size is not None:
            each = 1 if rowwise else int(size or 1)
            sizes = [min(each, rows - start) for start in range(0, rows, each)]
        seeds = [seed_of(seed, sum(sizes[:k])) for k in range(len(sizes))]
        model = self.oracle.model
        with torch.no_grad():
            ours = self.pipe.generate(
                group_size=size, rowwise=rowwise, seed=seed, in_flight=in_flight, **named
            )
            theirs = self._alone(lambda: generated(model, named, sizes, seeds))
        found = getattr(ours, "sequences", ours).tolist()
        mine = [row[: len(wanted)] for row, wanted in zip(found, theirs, strict=True)]
        pairs = ([torch.tensor(row) for row in each] for each in (mine, theirs))
        return compare_leaves("generated tokens", *pairs)

    def _goes_several_ways(self) -> bool:
        """Whether the batch takes another way through the model than some of its micro-batches.

        Then rows depend on each other, and may differ from those of the whole batch.
        """
        program = self.pipe.program
        inputs = [self.oracle.batch, *self.oracle.microbatches]
        traces = {id(program.trace_for(program.flatten_inputs(*i), False)) for i in inputs}
        return len(traces) > 1

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a training step on both; the two losses."""
        oracle, target = self.oracle, self.training.target
        if step == _STEPS and self._can_be_uneven():
            oracle, target = oracle.without_last_row(target)
        loss_fn, weight = self.training.loss_fn, self.training.weight
        args, kwargs = oracle.batch
        ours = self.pipe.train_step(*args, target=target, loss_fn=loss_fn, weight=weight, **kwargs)
        if isinstance(loss_fn, WholeBatch):
            return ours, self._alone(lambda: oracle.whole_step(step, loss_fn, target))
        return ours, self._alone(lambda: oracle.train_step(step, loss_fn, target, weight))

    def _can_be_uneven(self) -> bool:
        """Whether the batch divides evenly into micro-batches, and would not with one row fewer.

        False if that would leave a micro-batch of one row for a normalisation layer that may refuse
        it.
        """
        least, most = min(self.oracle.rows), max(self.oracle.rows)
        has_batchnorm = any(isinstance(module, NormBase) for module in self.oracle.model.modules())
        return least == most > (2 if has_batchnorm else 1) and len(self.oracle.rows) > 1

    def _gradients(self, what: str) -> Comparison:
        return compare(what, gradients_of(self.pipe.model), self._ordered(self.oracle.gradients))

    def _alone(self, function: Callable[[], T]) -> T:
        """Call `function` with the number of intra-op threads of a worker."""
        return run_with_threads(function, self.pipe.threads_per_worker)

    def _ordered(self, named: Mapping[str, T]) -> dict[str, T]:
        return in_forward_order(self.pipe.program.train, named)
