"""Replicas whose workers are ranks: each has a copy of the model, and none shares memory.

Every replica runs a block of the micro-batches: the first replica the first ones, and so on. The
ranks at the same place of all replicas form a ring.

*Gradients.* The first replica adds those of its micro-batches to `.grad`, as one device does, and
sends the sum to the next, which adds its own to that, one micro-batch after the other, and so on.
So the sum is the left fold of all micro-batches in order. A replica keeps its gradients apart until
the sum comes. The last one has the gradients of the batch; they go on around the ring, to all
others. Parameters travel in buckets, so that all links of the ring are busy at the same time:
as with an all-reduce on a ring, each carries at most twice the size of the gradients.

*BatchNorm.* The statistics of all micro-batches go around the ring, and every replica updates its
running statistics with all of them, in order (`penstock.engine.batchnorm.replay`).

*Optimizers.* Every parameter has an owner among the replicas of its stage, which updates it and
sends the new weights to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.engine.batchnorm import Seen
from penstock.engine.replicas import Replica, SummedStage, Terms, accumulate
from penstock.engine.stage import Before, MicroBatch, Stage
from penstock.errors import InputError
from penstock.links.link import Sink, Source, Values
from penstock.links.process_group import Line
from penstock.links.shared_memory import Giver, Taker
from penstock.plan.shares import BUCKET, blocks


class Ring:
    """The ranks at one place of all replicas, as seen by one of them.

    Args:
        replica: its number.
        of: how many there are.
        onward: takes values to the next replica; the last one's goes to the first.
        back: gives values of the one before.
    """

    def __init__(self, replica: int, of: int, onward: Taker, back: Giver) -> None:
        self.replica = replica
        self.of = of
        self._onward = onward
        self._back = back

    @property
    def is_first(self) -> bool:
        """Whether the sum begins here."""
        return self.replica == 0

    @property
    def is_last(self) -> bool:
        """Whether the sum ends here."""
        return self.replica == self.of - 1

    @property
    def passes_totals_on(self) -> bool:
        """Whether the next replica gets from this one what the last one has."""
        return self.replica + 1 < self.of - 1

    def expect(self, kinds: Sequence[Hashable]) -> None:
        """Which messages are sent next, see `Line.expect`; the one after them is unknown."""
        if isinstance(self._onward, Line):
            self._onward.expect([*kinds, None])

    def send(self, values: Sequence[Any]) -> None:
        """Send values to the next replica."""
        self._onward.put(values)

    def receive(self) -> Values:
        """The next values from the one before; waits for them."""
        return self._back.get()

    def all_gather(self, kind: Hashable, values: Sequence[Any]) -> list[Sequence[Any]]:
        """What every replica has of something, by its number.

        Args:
            kind: of values; those of one kind mostly have one size.
            values: what this one has.
        """
        self.expect([(kind, k) for k in range(1, self.of)])
        found: list[Sequence[Any]] = [values] * self.of
        for hop in range(1, self.of):
            self.send(values)
            values = found[(self.replica - hop) % self.of] = self.receive()
        return found


class ChainedSum:
    """A replica's part of the sum of gradients that goes around a ring.

    Args:
        ring: the replicas.
        parameters: gives those whose gradients are added up; the same on all replicas.
    """

    def __init__(self, ring: Ring, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.lends = False
        self._ring = ring
        self._parameters = parameters
        self.begin()

    def begin(self) -> None:
        """A pass begins, or the last one was given up."""
        self._kept: list[Sequence[Terms]] = []
        self._has_come = self._ring.is_first
        self._own = {id(parameter) for parameter in self._parameters()}

    def has_come(self, number: int) -> bool:
        """Whether `.grad` has the sum of all micro-batches before those of this replica."""
        return self._has_come

    def add(self, number: int, gradients: Sequence[Terms]) -> None:
        """Add the gradients of a micro-batch, or keep them until the sum of those before comes.

        Raises:
            InputError: there are some of tensors that other replicas do not have.
        """
        for leaf, _ in (term for terms in gradients for term in terms):
            if id(leaf) not in self._own:
                raise InputError(
                    f"the loss has a gradient for a tensor of shape {tuple(leaf.shape)} that is no "
                    "parameter of the model; every replica is a process with a tensor of its own, "
                    "so it cannot be added up. Make it a part of the model, or use "
                    'workers="threads", or replicas=1'
                )
        if not self._has_come:
            self._kept.append(gradients)
            return
        for terms in gradients:
            accumulate(terms)

    @contextmanager
    def in_turn(
        self, number: int, earlier: Sequence[Terms], leaves: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Around a backward that adds to `.grad` itself; waits for the sum of those before."""
        if not self._has_come:
            for bucket in self._buckets():
                self._take(bucket)
            self._kept, self._has_come = [], True
        self.add(number, earlier)
        yield

    def clear(self) -> None:
        """Stages share the sum, which is begun anew with each pass."""

    def finish(self) -> None:
        """All backwards of this replica are done: add its gradients to the sum, and have it all."""
        ring, buckets = self._ring, self._buckets()
        sums = [("sum", k) for k in range(len(buckets))]
        totals = [("total", k) for k in range(len(buckets) if ring.passes_totals_on else 0)]
        ring.expect([*sums, *totals])
        for bucket in buckets:
            if not self._has_come:
                self._take(bucket)
            ring.send([_gradient(parameter) for parameter in bucket])
        self._kept, self._has_come = [], True
        for bucket in buckets if not ring.is_last else ():
            values = ring.receive()
            if ring.passes_totals_on:
                ring.send(values)
            _put(bucket, values)

    def _take(self, bucket: Sequence[nn.Parameter]) -> None:
        """Have the sum of these so far, and add what was kept."""
        _put(bucket, self._ring.receive())
        mine = {id(parameter) for parameter in bucket}
        for terms in (terms for gradients in self._kept for terms in gradients):
            accumulate([(leaf, gradient) for leaf, gradient in terms if id(leaf) in mine])

    def _buckets(self) -> list[list[nn.Parameter]]:
        """The parameters, some together: the last ones, whose gradients are first, come first."""
        buckets: list[list[nn.Parameter]] = []
        size = BUCKET
        for parameter in reversed(self._parameters()):
            if size + parameter.nbytes > BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
        return buckets


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad if parameter.requires_grad else None
    return None if gradient is None else gradient.detach()


def _put(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Let these be the gradients; what another process has lent is copied."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        own = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            parameter.grad = gradient
        elif own is not None and own.layout is torch.strided and own.dtype == gradient.dtype:
            with torch.no_grad():
                own.copy_(gradient)
        else:
            parameter.grad = gradient.detach().clone()


class RingStage(SummedStage):
    """A stage of a replica on a rank. Its BatchNorms' statistics are left in `seen`."""

    def __init__(self, index: int, source: Source, sink: Sink, total: ChainedSum) -> None:
        super().__init__(index, source, sink, total)
        self.seen: Seen = {}

    def begin(
        self,
        microbatches: Sequence[MicroBatch],
        wanted: Sequence[nn.Parameter] | None,
        before: Before,
    ) -> None:
        """A pass begins, which may have no micro-batches for this replica."""
        super().begin(microbatches, wanted, before)
        self.seen = {}

    def end(self) -> None:
        """It has ended well: note what BatchNorms have seen, which are not moved yet."""
        self.seen = self.norms.take(range(len(self.microbatches)))


def update_norms(ring: Ring, stages: Sequence[RingStage], update: Callable[[Seen], None]) -> None:
    """Update running statistics with those that BatchNorms of all replicas have seen in a pass.

    Args:
        ring: the replicas.
        stages: of this rank.
        update: `move` or `replay` of `penstock.engine.batchnorm`.
    """
    if not any(stage.norms.are_training() for stage in stages):
        return
    modules = [(stage, module) for stage in stages for module in stage.norms]
    found = [[*stage.seen.get(module, {}).items()] for stage, module in modules]
    every = ring.all_gather("statistics", [found])
    seen = {
        module: dict(chain.from_iterable(of_replica[0][k] for of_replica in every))
        for k, (_, module) in enumerate(modules)
    }
    update({module: of_module for module, of_module in seen.items() if of_module})


@torch.no_grad()
def share_weights(
    ring: Ring, parameters: Sequence[nn.Parameter], owned: Sequence[nn.Parameter]
) -> None:
    """Let all replicas have the weights that each of them has updated.

    Args:
        ring: the replicas.
        parameters: of this rank's stages; the same on all replicas.
        owned: those that this rank has updated.
    """
    numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
    mine = [p for p in owned if id(p) in numbers]
    values = [[numbers[id(p)] for p in mine], *(p.detach() for p in mine)]
    for replica, (places, *weights) in enumerate(ring.all_gather("weights", values)):
        if replica != ring.replica:
            for k, weight in zip(places, weights, strict=True):
                parameters[k].copy_(weight)


@dataclass(frozen=True)
class RankReplica(Replica):
    """A replica whose workers are ranks; one of them is here.

    Attributes:
        total: the sum of its gradients and those of the others.
    """

    total: ChainedSum | None = None

    def share(self, microbatches: int) -> Sequence[int]:
        """Those of so many micro-batches that it runs: a block of them."""
        return blocks(microbatches, self.weights)[self.number]

    def largest_share(self, microbatches: int) -> int:
        """How many it runs itself: replicas do not wait for each other before they are done."""
        return len(self.share(microbatches))

    def stage(self, index: int, source: Source, sink: Sink) -> Stage:
        """A stage without ways."""
        if self.total is None:
            return super().stage(index, source, sink)
        return RingStage(index, source, sink, self.total)
