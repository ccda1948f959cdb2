"""One stage at work: its forward and backward for every micro-batch, and what it holds between.

A stage is given its values by a `Source` and gives its results to a `Sink`. Between two stages
these are the two ends of a link; before the first stage the source is the batch, behind the last
one the sink is the loss or the user's result. So no stage knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.capture.calls import Sizes
from penstock.capture.randomness import Key

Values = tuple[Any, ...]
Gradients = Sequence[torch.Tensor | None]
Roots = Sequence[GradientEdge | None]


class Source(Protocol):
    """Where a stage's values come from, and where their gradients go."""

    def receive(self, microbatch: int) -> Values:
        """The values of a micro-batch; waits for them."""

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Hand back the gradient of each value, `None` where there is none."""


class Sink(Protocol):
    """Where a stage's results go, and where their gradients come from."""

    def send(self, microbatch: int, results: Values) -> Roots:
        """Hand over a micro-batch's results; returns where its backward will start."""

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The gradient of each root; waits for them."""


class Held(NamedTuple):
    """What a stage holds of a micro-batch between its forward and its backward."""

    entry: Entry
    roots: Roots


class MicroBatch(NamedTuple):
    """What every stage knows of a micro-batch.

    Attributes:
        sizes: how large it is.
        key: where its random numbers are.
        way: which of the stage's modules it takes.
    """

    sizes: Sizes
    key: Key
    way: int = 0


class Stage:
    """One stage, bound to its neighbours.

    Attributes:
        index: its number, from 0.
        modules: one for each way through the model: `module(sizes, key, *values) -> tuple`, see
            `penstock.capture.lowering`.
        source: where values come from.
        sink: where results go.
        microbatches: the micro-batches of the step; set before it runs.
        held: what it holds, by micro-batch. 1F1B keeps at most `min(m, p - index)` here.
    """

    def __init__(
        self,
        index: int,
        modules: Sequence[Callable[..., Values]],
        source: Source,
        sink: Sink,
    ) -> None:
        self.index = index
        self.modules = list(modules)
        self.source = source
        self.sink = sink
        self.microbatches: Sequence[MicroBatch] = ()
        self.held: dict[int, Held] = {}
        self._arrived: Any = ()

    def await_values(self, microbatch: int) -> None:
        """Wait for what the next `forward` works on."""
        self._arrived = self.source.receive(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run the module on what has arrived, and hold what the backward needs."""
        values, self._arrived = self._arrived, ()
        entry, entered = enter(values)
        del values
        sizes, key, way = self.microbatches[microbatch]
        results = self.modules[way](sizes, key, *entered)
        del entered
        self.held[microbatch] = Held(entry, self.sink.send(microbatch, results))

    def infer(self, microbatch: int) -> None:
        """Run the module on what has arrived, without gradients."""
        values, self._arrived = self._arrived, ()
        sizes, key, way = self.microbatches[microbatch]
        self.sink.send(microbatch, self.modules[way](sizes, key, *values))

    def await_gradients(self, microbatch: int) -> None:
        """Wait for what the next `backward` works on."""
        self._arrived = self.sink.receive_gradients(microbatch)

    def backward(self, microbatch: int) -> None:
        """Run the backward: parameter gradients add up in `.grad`, the others go to the source."""
        gradients, self._arrived = self._arrived, ()
        entry, roots = self.held.pop(microbatch)
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if root is not None and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self.source.send_gradients(microbatch, entry.gradients)


def edges(results: Values) -> Roots:
    """For every result where its backward starts; the result itself need not be kept for that."""
    return [
        get_gradient_edge(r) if isinstance(r, torch.Tensor) and r.requires_grad else None
        for r in results
    ]


class Entry:
    """Catches the gradients of the values that entered a stage.

    Attributes:
        gradients: for every value its gradient, once the backward has run.
    """

    __slots__ = ("differentiable", "gradients")

    def __init__(self, values: Values) -> None:
        self.differentiable = [
            k for k, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad
        ]
        self.gradients: list[torch.Tensor | None] = [None] * len(values)

    def catch(self, gradients: Gradients) -> None:
        """Called by autograd with the gradients of the differentiable values."""
        for k, gradient in zip(self.differentiable, gradients, strict=True):
            self.gradients[k] = gradient


def enter(values: Values) -> tuple[Entry, Values]:
    """The values without their history, in an autograd graph of the stage's own.

    They share memory with the originals and are no leaves, so a stage may begin with an operation
    in place; and all of them come from one autograd node, so that their gradients are caught
    together without passing through `.grad`.
    """
    entry = Entry(values)
    if not entry.differentiable:
        return entry, values
    detached = [values[k].detach() for k in entry.differentiable]
    entered = list(values)
    anchor = torch.empty(0, requires_grad=True)
    fresh = _Enter.apply(entry, anchor, *detached)
    for k, value in zip(entry.differentiable, fresh, strict=True):
        entered[k] = value
    return entry, tuple(entered)


class _Enter(torch.autograd.Function):
    """The identity; its backward hands the gradients to the entry and ends there."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, anchor: torch.Tensor, *values: torch.Tensor) -> Values:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.entry.catch(gradients)
        return (None, None, *(None for _ in gradients))
