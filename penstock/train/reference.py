"""One device that runs the micro-batches of a batch one after the other: what is exact."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture import ROWS, Key, Program
from penstock.capture.calls import Ambient, ambient
from penstock.capture.randomness import LOSS, draw
from penstock.capture.trees import flatten, unflatten
from penstock.cores import use_threads
from penstock.engine.batch import Weight, weights
from penstock.engine.batchnorm import Norms
from penstock.engine.microbatch import merge, split, split_rows


class Reference:
    """One device that runs the micro-batches of a batch one after the other.

    It runs the model's own forward, not the lowered program.

    Args:
        model: the model, unsplit; gradients add up in its `.grad`.
        program: captured from a copy of it; it says which calls are random.
        num_microbatches: how many.
        args: positional arguments of the batch.
        kwargs: keyword arguments of the batch.
        deferred: whether BatchNorms are moved once per batch, as `batchnorm="deferred"` does.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        num_microbatches: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        deferred: bool = False,
    ) -> None:
        self.model = model
        self._norms = Norms()
        if deferred:
            self._norms.add(model.modules())
        self.program = program
        leaves, structure = flatten((tuple(args), dict(kwargs)))
        rows = program.varying.sizes(leaves)[ROWS]
        self._rows = split_rows(rows, min(num_microbatches, rows))
        self._parts = split(leaves, program.varying.batch_dims, len(self._rows))
        self._batches = [unflatten(structure, part) for part in self._parts]

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients of all parameters, by name."""
        return gradients_of(self.model)

    @property
    def microbatches(self) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
        """The positional and keyword arguments of each."""
        return list(self._batches)

    def train_step(
        self,
        step: int,
        loss_fn: Callable[..., torch.Tensor],
        target: Any,
        weight: Weight = "rows",
    ) -> torch.Tensor:
        """Accumulate the gradients of a batch, weighted as `Pipeline.train_step` does.

        A micro-batch of weight 0 runs its forward, for what that does to buffers, and is left out.
        """
        total: Any = 0.0
        targets = self._targets(target)
        given = [() if part is None else (part,) for part in targets]
        share = weights(weight, given, self._rows)
        with self._norms.during_a_pass():
            for microbatch, part in enumerate(targets):
                output = self._forward(step, microbatch)
                key = self._key(step, microbatch)
                loss = draw(key, LOSS, call_loss, loss_fn, output, part)
                if not share[microbatch]:  # nothing counts in it, so its mean may be no number
                    continue
                with ambient().without_autocast().autocasting():
                    (loss * share[microbatch]).backward()
                total = total + loss.detach() * share[microbatch]
        result: torch.Tensor = total
        return result

    def call(self, step: int) -> Any:
        """The result of the whole batch."""
        with self._norms.during_a_pass():
            return self._merged(self._forwards(step))

    def call_and_backward(
        self, step: int, loss_fn: Callable[..., torch.Tensor], target: Any
    ) -> Any:
        """The result of the batch; one loss of all of it, and its backward by micro-batch."""
        with self._norms.during_a_pass():
            outputs = self._forwards(step)
            leaves, structure = flatten(self._merged(outputs))
            leaves = [_as_leaf(leaf) for leaf in leaves]
            call_loss(loss_fn, unflatten(structure, leaves), target).backward()
            _back(outputs, leaves)
        return unflatten(structure, leaves)

    def _forwards(self, step: int) -> list[Any]:
        return [self._forward(step, i) for i in range(len(self._rows))]

    def _forward(self, step: int, microbatch: int) -> Any:
        args, kwargs = self._batches[microbatch]
        with self._norms.during(microbatch):
            return self.program.reference(args, kwargs, self._key(step, microbatch), self.model)

    def _key(self, step: int, microbatch: int) -> Key:
        return Key(torch.initial_seed(), step, microbatch)

    def _targets(self, target: Any) -> list[Any]:
        if target is None:
            return [None] * len(self._rows)
        leaves, structure = flatten(target)
        dims = [0 if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return [unflatten(structure, part) for part in split(leaves, dims, len(self._rows))]

    def _merged(self, outputs: Sequence[Any]) -> Any:
        if len(outputs) == 1:
            return outputs[0]
        trace = self.program.trace_for(self._parts[0], self.model.training)
        groups = [flatten(output)[0] for output in outputs]
        structure = flatten(outputs[0])[1]
        named = [k for k, v in enumerate(trace.outputs) if isinstance(groups[0][k], torch.Tensor)]
        joins = [trace.joins[k] for k in named]
        merged = merge(joins, [[group[k] for k in named] for group in groups])
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


def call_loss(loss_fn: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
    """The loss; a function of the output alone if there is no target."""
    return loss_fn(output) if target is None else loss_fn(output, target)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of all parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_()
    return leaf


def _back(outputs: Sequence[Any], leaves: Sequence[Any]) -> None:
    """The backward of every micro-batch's output, from the gradients of what they make together."""
    done = [0] * len(leaves)
    for output in outputs:
        pairs = []
        for k, (own, whole) in enumerate(zip(flatten(output)[0], leaves, strict=True)):
            if isinstance(own, torch.Tensor) and own.requires_grad and whole.grad is not None:
                dim = _varying(own, whole)
                pairs.append((own, whole.grad.narrow(dim, done[k], own.shape[dim])))
                done[k] += own.shape[dim]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _varying(part: torch.Tensor, whole: torch.Tensor) -> int:
    """The dimension in which a micro-batch's result is a slice of the whole."""
    sizes = zip(part.shape, whole.shape, strict=True)
    return next((d for d, (a, b) in enumerate(sizes) if a != b), 0)
