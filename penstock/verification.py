"""`verify`: exactness, proven on the user's own model."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from penstock.capture import ROWS, Key, Program, capture
from penstock.capture.calls import Ambient, ambient
from penstock.capture.dims import BatchDim, Dynamic
from penstock.capture.trees import flatten, unflatten
from penstock.cores import use_threads
from penstock.engine.microbatch import merge, split, split_rows
from penstock.pipeline import Pipeline
from penstock.plan import Plan
from penstock.plan.asked import Cut
from penstock.profile.measure import Progress
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
    recompute: str = "auto",
    memory_limit: int | str | None = None,
    stages_per_worker: int | Literal["auto"] = "auto",
    workers: Literal["threads", "processes"] = "threads",
    batch_dim: BatchDim = 0,
    dynamic: Dynamic | None = None,
    keep_closed: Iterable[str] = (),
    progress: Progress | None = None,
) -> VerifyReport:
    """Train copies of the model split and unsplit, and compare them bit for bit.

    The unsplit one is the user's own forward, run by one device on the same micro-batches, one
    after the other, with the same intra-op threads, its random calls seeded as the pipeline seeds
    them. Compared are the result of a call, the gradients of `loss.backward()` through it, losses,
    gradients, buffers and parameters over three `train_step`s with SGD, and the result of a call
    in evaluation mode. The user's model is not touched.

    Args:
        model: any module that can be copied by `copy.deepcopy`.
        args: positional arguments of a batch.
        kwargs: keyword arguments of a batch.
        target: as in `Pipeline.train_step`.
        loss_fn: as in `Pipeline.train_step`; a mean over rows.
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
        batch_dim: as in `Pipeline`.
        dynamic: as in `Pipeline`.
        keep_closed: as in `Pipeline`.
        progress: as in `Pipeline`.

    Returns:
        a report; `report.ok` is whether everything is equal, `str(report)` says what was compared.

    Raises:
        PenstockError: the pipeline cannot be built, or a step fails.
    """
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
        comparisons = _compare(pipe, reference, target, loss_fn, args, dict(kwargs or {}))
    subject = (
        f"{type(model).__name__} in {len(pipe.plan.stages)} stages, "
        f"{pipe.plan.num_microbatches} micro-batches, {pipe.plan.schedule}"
    )
    return VerifyReport(subject, tuple(comparisons))


def _compare(
    pipe: Pipeline,
    reference: Reference,
    target: Any,
    loss_fn: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Comparison]:
    threads = threads_per_worker(pipe.plan.devices)
    found = []

    def alone(function: Callable[[], Any]) -> Any:
        return run_with_threads(function, threads)

    # The plain style: call, loss, backward.
    output = pipe(*args, **kwargs)
    _call_loss(loss_fn, output, target).backward()
    expected = alone(partial(reference.call_and_backward, 0, loss_fn, target))
    found.append(compare_leaves("result of a call", flatten(output)[0], flatten(expected)[0]))
    found.append(compare("gradients of backward()", _gradients(pipe.model), reference.gradients))

    # The fast path, three steps with an optimizer.
    mine = torch.optim.SGD(pipe.model.parameters(), lr=_RATE)
    other = torch.optim.SGD(reference.model.parameters(), lr=_RATE)
    losses: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for step in range(1, _STEPS + 1):
        mine.zero_grad()
        other.zero_grad()
        losses[0].append(pipe.train_step(*args, target=target, loss_fn=loss_fn, **kwargs))
        losses[1].append(alone(partial(reference.train_step, step, loss_fn, target)))
        if step == 1:
            what = "gradients of train_step()"
            found.append(compare(what, _gradients(pipe.model), reference.gradients))
        mine.step()
        other.step()
    found.append(compare_leaves("losses", *losses))
    for what, names in (("parameters", "named_parameters"), ("buffers", "named_buffers")):
        ours, theirs = dict(getattr(pipe.model, names)()), dict(getattr(reference.model, names)())
        if theirs:
            found.append(compare(f"{what} after {_STEPS} steps", ours, theirs))

    # Evaluation.
    pipe.eval()
    reference.model.eval()
    with torch.no_grad():
        output = pipe(*args, **kwargs)
        expected = alone(partial(reference.call, _STEPS + 1))
    what = "result of a call in evaluation mode"
    found.append(compare_leaves(what, flatten(output)[0], flatten(expected)[0]))
    return found


class Reference:
    """One device that runs the micro-batches of a batch one after the other.

    It runs the model's own forward, not the lowered program.

    Args:
        model: the model, unsplit; gradients add up in its `.grad`.
        program: captured from a copy of it; it says which calls are random.
        num_microbatches: how many.
        args: positional arguments of the batch.
        kwargs: keyword arguments of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        num_microbatches: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.model = model
        self._program = program
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        rows = program.varying.sizes(leaves)[ROWS]
        self._rows = split_rows(rows, min(num_microbatches, rows))
        self._parts = split(leaves, program.varying.batch_dims, len(self._rows))
        self._batches = [unflatten(structure, part) for part in self._parts]

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients of all parameters, by name."""
        return _gradients(self.model)

    def train_step(
        self, step: int, loss_fn: Callable[..., torch.Tensor], target: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of a batch, each micro-batch weighted by its rows."""
        total: Any = 0.0
        share = [count / sum(self._rows) for count in self._rows]
        for microbatch, part in enumerate(self._targets(target)):
            loss = _call_loss(loss_fn, self._forward(step, microbatch), part)
            with ambient().without_autocast().autocasting():
                (loss * share[microbatch]).backward()
            total = total + loss.detach() * share[microbatch]
        result: torch.Tensor = total
        return result

    def call(self, step: int) -> Any:
        """The result of the whole batch."""
        outputs = [self._forward(step, i) for i in range(len(self._rows))]
        return self._merged(outputs)

    def call_and_backward(
        self, step: int, loss_fn: Callable[..., torch.Tensor], target: Any
    ) -> Any:
        """The result of the batch; one loss of all of it, and its backward by micro-batch."""
        outputs = [self._forward(step, i) for i in range(len(self._rows))]
        leaves, structure = flatten(self._merged(outputs))
        leaves = [_as_leaf(leaf) for leaf in leaves]
        _call_loss(loss_fn, unflatten(structure, leaves), target).backward()
        done = [0] * len(leaves)
        for output in outputs:
            pairs = []
            for k, (own, whole) in enumerate(zip(flatten(output)[0], leaves, strict=True)):
                if isinstance(own, torch.Tensor) and own.requires_grad and whole.grad is not None:
                    dim = _varying(own, whole)
                    pairs.append((own, whole.grad.narrow(dim, done[k], own.shape[dim])))
                    done[k] += own.shape[dim]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return unflatten(structure, leaves)

    def _forward(self, step: int, microbatch: int) -> Any:
        args, kwargs = self._batches[microbatch]
        key = Key(torch.initial_seed(), step, microbatch)
        return self._program.reference(args, kwargs, key, self.model)

    def _targets(self, target: Any) -> list[Any]:
        if target is None:
            return [None] * len(self._rows)
        leaves, structure = flatten(target)
        dims = [0 if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return [unflatten(structure, part) for part in split(leaves, dims, len(self._rows))]

    def _merged(self, outputs: Sequence[Any]) -> Any:
        if len(outputs) == 1:
            return outputs[0]
        trace = self._program.trace_for(self._parts[0], self.model.training)
        groups = [flatten(output)[0] for output in outputs]
        structure = flatten(outputs[0])[1]
        named = [k for k, v in enumerate(trace.outputs) if isinstance(groups[0][k], torch.Tensor)]
        values = [trace.outputs[k] for k in named]
        merged = merge(trace, values, [[group[k] for k in named] for group in groups])
        leaves = list(groups[0])
        for k, tensor in zip(named, merged, strict=True):
            leaves[k] = tensor
        return unflatten(structure, leaves)


def copied(model: nn.Module) -> nn.Module:
    """A copy of its own; without gradients, for what torch.jit compiled would pass them on."""
    with torch.no_grad():
        twin = copy.deepcopy(model)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return twin


def run_with_threads(function: Callable[[], Any], threads: int) -> Any:
    """Run `function` in a thread of its own with this many intra-op threads; its result."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        use_threads(threads)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    modes = ambient()
    thread = threading.Thread(target=lambda: _under(modes, work))
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _under(modes: Ambient, work: Callable[[], None]) -> None:
    with torch.set_grad_enabled(modes.grad), modes.autocasting():
        work()


def _call_loss(loss_fn: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
    return loss_fn(output) if target is None else loss_fn(output, target)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_()
    return leaf


def _varying(part: torch.Tensor, whole: torch.Tensor) -> int:
    """The dimension in which a micro-batch's result is a slice of the whole."""
    sizes = zip(part.shape, whole.shape, strict=True)
    return next((d for d, (a, b) in enumerate(sizes) if a != b), 0)
