"""Replicas whose workers are ranks: each has a copy of the model, and none shares memory.

Every replica runs a block of the micro-batches: the first replica the first ones, and so on. The
ranks at the same place of all replicas form a ring.

*Gradients.* The first replica adds those of its micro-batches to `.grad`, as one device does, and
sends the sum to the next, which adds its own to that, one micro-batch after the other, and so on.
So the sum is the left fold of all micro-batches in order. A replica keeps its gradients apart until
the sum comes. The last one has the gradients of the batch; they go on around the ring, to all
others. Parameters travel in buckets, so that all links of the ring are busy at the same time:
as with an all-reduce on a ring, each carries at most twice the size of the gradients. In the last
backward of a replica, buckets whose gradients are final go on while it runs.

*BatchNorm.* The statistics of all micro-batches go around the ring, and every replica updates its
running statistics with all of them, in order (`penstock.engine.batchnorm.replay`).

*Optimizers.* Every parameter has an owner among the replicas of its stage, which updates it and
sends the new weights to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from penstock.engine.batchnorm import Seen, Statistics
from penstock.engine.replicas import Reached, Replica, SummedStage
from penstock.engine.span import OWN_FUNCTIONS, EntryNode, MicroBatch, Span
from penstock.engine.stage import Before, Stage
from penstock.engine.sums import Terms, accumulate
from penstock.errors import InputError
from penstock.links.link import Gradients, Roots, Sink, Source, Values
from penstock.links.process_group import GroupEnd
from penstock.links.shared_memory import Giver, Taker
from penstock.plan.shares import BUCKET, blocks
from penstock.torch_internals import BatchNorm

_MOST_BUCKETS = 64


class Ring:
    """The ranks at one place of all replicas, as seen by one of them.

    Args:
        replica: its number.
        of: how many there are.
        onward: takes values to the next replica; the last one's goes to the first.
        back: gives values of the one before.
        waits: whether sending waits for what the device computes, so that backwards come first.
    """

    def __init__(
        self, replica: int, of: int, onward: Taker, back: Giver, waits: bool = False
    ) -> None:
        self.replica = replica
        self.of = of
        self.waits = waits
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
        """Which messages are sent next, see `GroupEnd.expect`; the one after them is unknown."""
        if isinstance(self._onward, GroupEnd):
            self._onward.expect([*kinds, None])

    def send(self, values: Sequence[Any]) -> None:
        """Send values to the next replica."""
        self._onward.put(values)

    def receive(self) -> Values:
        """The next values from the one before; waits for them."""
        return self._back.get()

    def receive_nowait(self) -> Values | None:
        """The next values from the one before, if they are there."""
        return self._back.get_nowait()

    def all_gather(self, kind: Hashable, values: Sequence[Any]) -> list[Sequence[Any]]:
        """What every replica has of something, by its number.

        Args:
            kind: of values; those of one kind mostly have one size.
            values: what this one has.
        """
        self.expect([(kind, k) for k in range(1, self.of)])
        found: list[Sequence[Any]] = [values] * self.of
        for hop in range(1, self.of):
            if not self.is_first:
                self.send(values)
            come = found[(self.replica - hop) % self.of] = self.receive()
            if self.is_first:  # or all would send, and wait for others to read
                self.send(values)
            values = come
        return found


class ChainedSum:
    """A replica's part of the sum of gradients that goes around a ring, bucket by bucket.

    A bucket's sum goes on as soon as it has come and this replica's gradients are final; nobody
    waits for that before all backwards are done. So buckets may overtake each other: a message
    says which one it has.

    Before each message everything that has come is taken, and on one machine also while a replica
    waits for room (`penstock.links.intake`); between machines only one more message can come to it
    meanwhile, and a link has room for one. So replicas that send to each other never wait for ever,
    however little their sockets hold.

    Args:
        ring: the replicas.
        parameters: gives those whose gradients are added up; the same on all replicas.
    """

    def __init__(self, ring: Ring, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.lends = False
        self.overlaps = False
        self._ring = ring
        self._parameters = parameters
        self._usual: list[_Bucket] = []  # that were sent in the last pass
        self.begin()

    def begin(self, several: Collection[nn.Parameter] = ()) -> None:
        """A pass begins, or the last one was given up.

        Args:
            several: the parameters that several stages of this rank use.
        """
        ring, parameters = self._ring, self._parameters()
        self.overlaps = not ring.waits and not any(map(_has_hooks, parameters))
        self._buckets = buckets_of(parameters)
        self._number = {id(p): k for k, bucket in enumerate(self._buckets) for p in bucket}
        self._several = set(map(id, several))
        self._open = [{id(p) for p in bucket if p.requires_grad} for bucket in self._buckets]
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._come: dict[int, Sequence[torch.Tensor | None]] = {}
        self._has_come = ring.is_first
        count = len(self._buckets)
        self._to_send = dict.fromkeys(range(count))
        self._sums = 0 if ring.is_first else count  # that are to come
        self._totals = 0 if ring.is_last else count
        self._sent: list[_Bucket] = []
        self._to_pass_on: list[_Message] = []
        messages = [_Bucket(ring.is_last, k) for k in range(count)]
        messages += [_Bucket(True, k) for k in range(count) if ring.passes_totals_on]
        ring.expect(self._usual if len(self._usual) == len(messages) else messages)

    def has_come(self, number: int) -> bool:
        """Whether `.grad` has the sum of all micro-batches before those of this replica."""
        return self._has_come

    def send(self, terms: Terms) -> Terms:
        """Gradients of a micro-batch, which stay here."""
        return terms

    def add(self, number: int, sent: Sequence[Terms]) -> None:
        """Add the gradients of a micro-batch, or keep them until the sum of those before comes.

        Raises:
            InputError: there are some of tensors that other replicas do not have.
        """
        for leaf, gradient in (term for terms in sent for term in terms):
            if id(leaf) not in self._number:
                raise InputError(
                    f"the loss has a gradient for a tensor of shape {tuple(leaf.shape)} that is no "
                    "parameter of the model; every replica is a process with a tensor of its own, "
                    "so it cannot be added up. Make it a part of the model, or use "
                    'workers="threads", or replicas=1'
                )
            if not self._has_come:
                self._kept.setdefault(id(leaf), []).append(gradient)
        if self._has_come:
            for terms in sent:
                accumulate(terms)

    @contextmanager
    def in_turn(
        self, number: int, earlier: Sequence[Terms], leaves: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Around a backward that adds to `.grad` itself; waits for the sum of those before."""
        if not self._has_come:
            while self._sums:
                self._note(self._ring.receive())
            for k in self._to_send:
                self._sum(k, stays=True)
            self._has_come = True
        self.add(number, earlier)
        yield

    def clear(self) -> None:
        """Stages share the sum, which is begun anew with each pass."""

    # -- as gradients become final ----------------------------------------------------------

    @contextmanager
    def awaiting(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around a backward that adds to `.grad` of these for the last time."""
        handles = [p.register_post_accumulate_grad_hook(self._added_to) for p in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _added_to(self, parameter: torch.Tensor) -> None:
        self.final([parameter])

    @contextmanager
    def catching(self, parameters: Sequence[nn.Parameter]) -> Iterator[set[int]]:
        """Around the last backward that computes gradients of these, without adding to `.grad`.

        Each gradient is added to the sum as soon as it is computed.

        Yields:
            the ids of the parameters whose gradients were added: the caller must not add them.
        """
        caught: set[int] = set()

        def catch(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                handles.pop(id(parameter)).remove()  # or it would be called in the addition
                caught.add(id(parameter))
                self.add(0, [[(parameter, gradient)]])
                self.final([parameter])

        handles = {id(p): p.register_hook(partial(catch, p)) for p in parameters}
        try:
            yield caught
        finally:
            for handle in handles.values():
                handle.remove()

    def final(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that gradients of these are final here; sends what can be sent by now.

        Raises:
            Gone: a neighbour is gone.
        """
        for parameter in parameters:
            if id(parameter) not in self._several:
                self._open[self._number[id(parameter)]].discard(id(parameter))
        self._go_on()

    def finish(self) -> None:
        """After the last backward of this replica, wait until `.grad` has the whole sum."""
        for still in self._open:
            still.clear()
        self.final(())
        while self._awaits_more:
            self._note(self._ring.receive())
            self._go_on()
        self._usual = self._sent

    @property
    def _awaits_more(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._sums or self._totals)

    def _note(self, values: Values) -> None:
        """Take note of what the replica before has sent: a sum so far, or that of all."""
        (is_total, k), *packed = values
        gradients = _unpacked(packed)
        if not is_total:
            self._sums -= 1
            self._come[k] = gradients
            return
        self._totals -= 1
        if self._ring.passes_totals_on:
            self._to_pass_on.append(_Message(_Bucket(True, k), gradients))
        _put(self._buckets[k], gradients)

    def _go_on(self) -> None:
        """Take what has come, and send what can be sent, until there is nothing of either."""
        while True:
            while self._awaits_more and (values := self._ring.receive_nowait()) is not None:
                self._note(values)
            message = self._to_pass_on.pop(0) if self._to_pass_on else self._final_sum()
            if message is None:
                return
            self._sent.append(message.bucket)
            self._ring.send([tuple(message.bucket), *_packed(message.gradients)])

    def _final_sum(self) -> _Message | None:
        """The sum of a bucket that has come and whose gradients here are final, if there is one."""
        for k in self._to_send:
            if not self._open[k] and (self._has_come or k in self._come):
                del self._to_send[k]
                is_last = self._ring.is_last
                return _Message(_Bucket(is_last, k), self._sum(k, stays=is_last))
        return None

    @torch.no_grad()
    def _sum(self, k: int, stays: bool) -> Sequence[torch.Tensor | None]:
        """The sum of a bucket's gradients, this replica's included.

        Args:
            k: the bucket.
            stays: whether `.grad` has to have it, also where this replica adds nothing.
        """
        bucket = self._buckets[k]
        if k not in self._come:  # backwards have added to it
            return [_gradient(parameter) for parameter in bucket]
        sums: list[torch.Tensor | None] = []
        for parameter, so_far in zip(bucket, self._come.pop(k), strict=True):
            terms = self._kept.pop(id(parameter), ())
            if terms:
                _add(parameter, so_far, terms)
            elif stays:
                _put([parameter], [so_far])
            sums.append(_gradient(parameter) if terms else so_far)
        return sums


class _Bucket(NamedTuple):
    """What a message has: whether the sums of all replicas, and the number of the bucket."""

    is_total: bool
    number: int


class _Message(NamedTuple):
    """What is sent: a bucket, and the gradients of its parameters."""

    bucket: _Bucket
    gradients: Sequence[torch.Tensor | None]


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters, some together: the last ones, whose gradients are first, come first.

    There are never many, so that a socket mostly has room for messages of all of them, and no
    backward has to wait until the next replica reads.
    """
    buckets: list[list[nn.Parameter]] = []
    size = full = max(BUCKET, -(-sum(p.nbytes for p in parameters) // _MOST_BUCKETS))
    for parameter in reversed(parameters):
        if size >= full:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether it has hooks, which are called in the order of micro-batches."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _add(
    parameter: nn.Parameter, so_far: torch.Tensor | None, terms: Sequence[torch.Tensor]
) -> None:
    """Let `.grad` be a sum and some gradients, one after the other, as autograd adds them.

    Hooks of the parameter after accumulation are called.
    """
    alike = so_far is not None and all(_is_like(so_far, gradient) for gradient in terms)
    if so_far is None or not alike or parameter._post_accumulate_grad_hooks:
        _put([parameter], [so_far])
        for gradient in terms:
            accumulate([(parameter, gradient)])
        return
    own, (first, *others) = parameter.grad, terms
    fits = own is not None and _is_like(so_far, own) and own.stride() == so_far.stride()
    total = own if own is not None and fits else torch.empty_like(so_far)
    torch.add(so_far, first, out=total)
    for gradient in others:
        total.add_(gradient)
    parameter.grad = total


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are dense and have one dtype."""
    return one.layout is other.layout is torch.strided and one.dtype == other.dtype


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad if parameter.requires_grad else None
    return None if gradient is None else gradient.detach()


def _packed(gradients: Sequence[torch.Tensor | None]) -> list[Any]:
    """Gradients as they are sent: sparse ones as the tensors that they consist of.

    The first value has the shapes of these, and whether their entries were added up.
    """
    sparse = [
        (tuple(g.shape), g.is_coalesced()) if g is not None and _is_sparse(g) else None
        for g in gradients
    ]
    values: list[Any] = [sparse if any(sparse) else None]
    for gradient in gradients:
        if gradient is not None and _is_sparse(gradient):
            values += [gradient._indices(), gradient._values()]
        else:
            values.append(gradient)
    return values


def _unpacked(values: Sequence[Any]) -> list[torch.Tensor | None]:
    """The gradients that `_packed` has made these values of."""
    sparse, *parts = values
    if sparse is None:
        return parts
    left = iter(parts)
    return [
        next(left)
        if about is None
        else torch.sparse_coo_tensor(
            *(next(left), next(left), about[0]), is_coalesced=about[1], check_invariants=False
        )
        for about in sparse
    ]


def _is_sparse(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.sparse_coo


def _put(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Let these be the gradients; what another process has lent is copied."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        own = parameter.grad
        if gradient is None:
            parameter.grad = None
        elif own is not None and _is_like(own, gradient):
            with torch.no_grad():
                own.copy_(gradient)
        else:
            parameter.grad = gradient.detach().clone()


class RingStage(SummedStage):
    """A stage of a replica on a rank. Its BatchNorms' statistics are left in `seen`.

    Args:
        index, source, sink: as of `Stage`.
        total: the sum that its gradients are added to.
    """

    def __init__(self, index: int, source: Source, sink: Sink, total: ChainedSum) -> None:
        super().__init__(index, source, sink, total)
        self.seen: Seen = {}
        self._chain = total
        self._left = 0  # backwards that are still to come
        self._way = 0  # of the micro-batch
        self._at = 0  # the span whose backward is next; behind the last if that is the end alone
        self._ending: dict[tuple[int, int], dict[int, nn.Parameter]] = {}

    def begin(
        self,
        microbatches: Sequence[MicroBatch],
        wanted: Sequence[nn.Parameter] | None,
        before: Before,
        share: Sequence[int],
    ) -> None:
        """A pass begins, which may have no micro-batches for this replica."""
        super().begin(microbatches, wanted, before, share)
        self.seen = {}
        self._left = len(share)

    def end(self) -> None:
        """It has ended well: note what BatchNorms have seen, which are not moved yet."""
        self.seen = self.norms.take(range(len(self.microbatches)))

    def backward(self, microbatch: int) -> None:
        """Run the backward; in the last one of a pass gradients are sent on as they are final."""
        self._left -= 1
        self._way, self._at = self.microbatches[microbatch].way, len(self.held[microbatch].inner)
        super().backward(microbatch)

    def _backward_of(self, roots: Roots, gradients: Gradients, entry: EntryNode) -> None:
        """The backward of a span; after the last one its parameters' gradients are final."""
        super()._backward_of(roots, gradients, entry)
        if self._is_ending:
            sent, self._sent = self._sent, []
            self._chain.add(self._number, sent)
            self._chain.final(self._ends_now().values())
        self._at -= 1

    def _add_directly(self, roots: Roots, gradients: Gradients, entry: EntryNode) -> None:
        """Add to `.grad`; see `_backward_of`."""
        if not self._is_ending:
            super()._add_directly(roots, gradients, entry)
            return
        reached = Reached.of(root for root in roots if root is not None)
        with self._chain.awaiting(self._final_in(reached)):
            super()._add_directly(roots, gradients, entry)

    def _computed(
        self,
        starts: Sequence[GradientEdge],
        leaves: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        reached: Reached,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of leaves, but for those that have already been added to the sum."""
        final = self._final_in(reached) if self._is_ending else []
        with self._chain.catching(final) as caught:
            found = super()._computed(starts, leaves, values, reached)
        return [
            None if id(leaf) in caught else gradient
            for leaf, gradient in zip(leaves, found, strict=True)
        ]

    @property
    def _is_ending(self) -> bool:
        """Whether gradients become final in the present backward, which is the last one."""
        return not self._left and self._chain.overlaps

    def _final_in(self, found: Reached) -> list[nn.Parameter]:
        """The parameters whose gradients become final in a backward, each when it is computed.

        None, if the backward may run another one, which may add to any of them.
        """
        ending = self._ends_now()
        if found.nested or found.functions - OWN_FUNCTIONS:
            return []
        leaves = {id(leaf) for leaf in found.leaves}
        if self.wanted is not None:
            leaves &= {id(parameter) for parameter in self.wanted}
        self._chain.final(p for key, p in ending.items() if key not in leaves)
        return [p for key, p in ending.items() if key in leaves]

    def _ends_now(self) -> dict[int, nn.Parameter]:
        """The parameters of the present span that no earlier one uses, by id."""
        key = self._way, self._at
        if key not in self._ending:
            spans = self.ways[self._way]
            used = {id(p) for span in spans[: self._at] for p in _parameters_of(span)}
            own = [p for span in spans[self._at : self._at + 1] for p in _parameters_of(span)]
            self._ending[key] = {id(p): p for p in own if id(p) not in used}
        return self._ending[key]


def used_by_several(stages: Iterable[Stage]) -> list[nn.Parameter]:
    """The parameters that more than one of these stages uses, on whatever way."""
    users: Counter[nn.Parameter] = Counter()
    for stage in stages:
        users.update({p for spans in stage.ways for span in spans for p in _parameters_of(span)})
    return [parameter for parameter, count in users.items() if count > 1]


def _parameters_of(span: Span) -> list[nn.Parameter]:
    return list(span.module.parameters()) if isinstance(span.module, nn.Module) else []


def update_batchnorms(
    ring: Ring, stages: Sequence[RingStage], update: Callable[[Seen], None]
) -> None:
    """Update running statistics with those that BatchNorms of all replicas have seen in a pass.

    Args:
        ring: the replicas.
        stages: of this rank.
        update: `move` or `replay` of `penstock.engine.batchnorm`.
    """
    if not any(stage.norms.are_training() for stage in stages):
        return
    modules = [(stage, module) for stage in stages for module in stage.norms]
    found = [stage.seen.get(module, {}) for stage, module in modules]
    about = [
        [(number, [(s.number, s.dtype) for s in calls]) for number, calls in own.items()]
        for own in found
    ]
    every_call = chain.from_iterable(calls for own in found for calls in own.values())
    tensors = chain.from_iterable((s.mean, s.variance) for s in every_call)
    seen: dict[BatchNorm, dict[int, list[Statistics]]] = {module: {} for _, module in modules}
    for of_replica, *parts in ring.all_gather("statistics", [about, *tensors]):
        left = iter(parts)
        for own, (_, module) in zip(of_replica, modules, strict=True):
            for number, calls in own:
                seen[module][number] = [Statistics(n, next(left), next(left), d) for n, d in calls]
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
