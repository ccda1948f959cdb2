"""One stage at work: its forward and backward for every micro-batch, and what it holds between.

A stage is given its values by a `Source` and gives its results to a `Sink`. Between two stages
these are the two ends of a link; before the first stage the source is the batch, behind the last
one the sink is the loss or the user's result. So no stage knows which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.board.activity import RECOMPUTATION, SENDING
from penstock.board.memory import Record
from penstock.capture.halves import Deferral, Pending, run_pending
from penstock.capture.randomness import undisturbed
from penstock.engine.batchnorm import BatchNorms
from penstock.engine.residents import Residents
from penstock.engine.span import (
    EntryNode,
    MicroBatch,
    Passed,
    Rerun,
    Span,
    apart,
    enter,
    run_backward,
    run_span,
)
from penstock.links.link import Gradients, Roots, Sink, Source, edges


class Held(NamedTuple):
    """What a stage holds of a micro-batch between its forward and its backward.

    Attributes:
        inner: one entry for each span, in order, without the entry that is in `end`.
        end: where the backward begins, with the gradients that the sink gives.
    """

    inner: list[Passed | Rerun]
    end: Passed


class Before(NamedTuple):
    """How many micro-batches there were in earlier passes, of whatever size.

    Attributes:
        forwards: that have run forward.
        backwards: that have run backward.
    """

    forwards: int = 0
    backwards: int = 0

    def and_then(self, goes_forward: bool, goes_back: bool, count: int) -> Before:
        """With one more pass of so many micro-batches."""
        return Before(self.forwards + count * goes_forward, self.backwards + count * goes_back)


class Stage:
    """One stage, bound to its neighbours.

    Attributes:
        index: its number, from 0.
        ways: its spans, one at least, for each way through the model.
        source: where values come from.
        sink: where results go.
        deferral: where the modules leave the weight halves of backwards, if they halve any.
        norms: its BatchNorms, if their running statistics are those of the whole batch.
        microbatches: the micro-batches of the step; set before it runs.
        first: the number of the first of them, counted over all passes, if replicas run the same
            modules; otherwise 0.
        wanted: the parameters whose gradients a backward computes; `None` for all.
        held: what it holds, by micro-batch. 1F1B keeps at most `min(m, p - index)` here.
        deferred: the weight halves that are still to be computed, by micro-batch.
        record: where the worker notes what it does; set before a pass.
        giving: the part of an action that is noted while results go to the sink: `SENDING`, or
            `LOSS` in the last stage.
        residents: the values that its worker keeps between passes.
    """

    def __init__(
        self, index: int, ways: Sequence[Sequence[Span]], source: Source, sink: Sink
    ) -> None:
        self.index = index
        self.ways = [list(spans) for spans in ways]
        self.source = source
        self.sink = sink
        self.deferral = Deferral()
        self.norms = BatchNorms()
        self.microbatches: Sequence[MicroBatch] = ()
        self.first = 0
        self.wanted: Sequence[nn.Parameter] | None = None
        self.held: dict[int, Held] = {}
        self.deferred: dict[int, list[Pending]] = {}
        self.record = Record()
        self.giving = SENDING
        self.residents = Residents()
        self._arrived: Any = ()
        self._keeps_states = False

    def begin(
        self,
        microbatches: Sequence[MicroBatch],
        wanted: Sequence[nn.Parameter] | None,
        before: Before,
        share: Sequence[int],
    ) -> None:
        """Begin a pass.

        Args:
            microbatches: all of its.
            wanted: the parameters whose gradients a backward computes; `None` for all.
            before: what came before it.
            share: the micro-batches that the stage runs.
        """
        self.microbatches, self.wanted = microbatches, wanted
        for span in chain.from_iterable(self.ways):
            if span.recorded_on is not None:
                span.begin()
        self.norms.begin()

    def end(self) -> None:
        """End a pass that has ended well: fold what BatchNorms have seen into their statistics."""
        self.norms.fold()

    def await_values(self, microbatch: int) -> None:
        """Wait for what the next `forward` works on."""
        self._arrived = self.source.receive(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run the spans on what has arrived, and hold what the backward needs."""
        values, self._arrived = self._arrived, ()
        sizes, key, way, _ = self.microbatches[microbatch]
        self.norms.current.microbatch = self.first + microbatch
        inner: list[Passed | Rerun] = []
        *spans, last = self.ways[way]
        for span in spans:
            start, values = run_span(span, values, sizes, key)
            inner.append(start if isinstance(start, Rerun) else Passed(start, edges(values)))
        start, values = run_span(last, values, sizes, key)
        self.norms.current.microbatch = None
        if isinstance(start, Rerun):  # the sink's own graph begins behind it
            inner.append(start)
            start, values = enter(values)
        before = self.record.enter(self.giving)
        roots = self.sink.send(microbatch, values)
        self.record.note(before)
        self.held[microbatch] = Held(inner, Passed(start, roots))

    def infer(self, microbatch: int) -> None:
        """Run the spans on what has arrived, without gradients."""
        values, self._arrived = self._arrived, ()
        known = self.microbatches[microbatch]
        self.norms.current.microbatch = self.first + microbatch
        for span in self.ways[known.way]:
            values = span.infer(known, values, self.residents)
        self.norms.current.microbatch = None
        before = self.record.enter(self.giving)
        self.sink.send(microbatch, values)
        self.record.note(before)

    def await_gradients(self, microbatch: int) -> None:
        """Wait for what the next `backward` works on."""
        self._arrived = self.sink.receive_gradients(microbatch)

    def backward(self, microbatch: int) -> None:
        """Run the backward: parameter gradients add up in `.grad`, the others go to the source.

        What modules put off of it remains for `weight_backward`.
        """
        self._catch_up(microbatch)
        spans = self.ways[self.microbatches[microbatch].way]
        self._keeps_states = any(span.keeps_states for span in spans)
        gradients, self._arrived = self._arrived, ()
        inner, end = self.held.pop(microbatch)
        self._backward_of(end.roots, gradients, end.entry)
        gradients = end.entry.gradients
        del end
        while inner:
            passed = inner.pop()
            entry, roots = self._again(passed) if isinstance(passed, Rerun) else passed
            self._backward_of(roots, apart(gradients), entry)
            gradients = entry.gradients
            del passed, roots
        pending = self.deferral.take()
        found = apart([*gradients, *(half.gradient for half in pending)])
        handed_on, kept = found[: len(gradients)], found[len(gradients) :]
        if pending:
            pairs = zip(pending, kept, strict=True)
            self.deferred[microbatch] = [
                half._replace(gradient=own) for half, own in pairs if own is not None
            ]
        before = self.record.enter(SENDING)
        self.source.send_gradients(microbatch, handed_on)
        self.record.note(before)

    def _catch_up(self, microbatch: int) -> None:
        """Compute the weight halves of those before, if this one has taken another way.

        What is put off on one way may be computed at once on another, and gradients have to be
        added in the order of micro-batches.
        """
        way = self.microbatches[microbatch].way
        if any(self.microbatches[before].way != way for before in self.deferred):
            for before in sorted(self.deferred):
                self.weight_backward(before)

    def _again(self, passed: Rerun) -> Passed:
        """Run the forward of a span again."""
        before = self.record.enter(RECOMPUTATION)
        again = passed.run()
        self.record.note(before)
        return again

    def _backward_of(self, roots: Roots, gradients: Gradients, entry: EntryNode) -> None:
        """The backward of a span: gradients of parameters add up in `.grad`, others in `entry`."""
        with self._in_autograd():
            run_backward(roots, gradients, self._leaves(entry))

    def _in_autograd(self) -> AbstractContextManager[object]:
        """Around a backward of autograd, in which nothing waits for other workers.

        If a checkpoint in it sets the states of generators, no other thread runs a seeded call.
        """
        return undisturbed() if self._keeps_states else nullcontext()

    def weight_backward(self, microbatch: int) -> None:
        """Compute the weight halves that the backward has put off."""
        run_pending(self.deferred.pop(microbatch, ()), self.wanted)

    def _leaves(self, entry: EntryNode) -> list[torch.Tensor] | None:
        """The leaves of which the backward of a span computes gradients; `None` for all."""
        if self.wanted is None:
            return None
        anchors = [entry.anchor, self.deferral.anchor if self.wanted else None]
        return [*(anchor for anchor in anchors if anchor is not None), *self.wanted]

    def clear(self) -> None:
        """Let go of everything that a step has left."""
        self.held, self.deferred, self._arrived = {}, {}, ()
        self.deferral.take()
        self.clear_batchnorms()
        self.microbatches, self.wanted = (), None

    def clear_batchnorms(self) -> None:
        """Forget what BatchNorms have seen in this pass."""
        self.norms.clear()
