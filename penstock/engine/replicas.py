"""Stages of several replicas that run the same modules: what they add and change comes in order.

Replicas share the micro-batches of a batch. Each has a stage of its own for every stage of the
plan, and all of these run the user's one model at the same time, in threads. Two things must not
depend on which of them is faster:

*Gradients.* A replica computes those of a micro-batch apart from `.grad`. They are added there in
the order of micro-batches, as on one device (`sums.py`, `gathered.py`).

*What modules remember*, such as BatchNorm's running statistics. Such a module is called for one
micro-batch after the other (`Turns`). Everything else runs at the same time.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from penstock.capture.history import history, nests
from penstock.capture.preserve import own_generators
from penstock.devices.kind import Event
from penstock.engine.batchnorm import BatchNorms
from penstock.engine.ends import Outlet
from penstock.engine.gathered import GatheredSum, Gathering
from penstock.engine.span import (
    OWN_FUNCTIONS,
    EntryNode,
    MicroBatch,
    Span,
    calls_of,
    read_by,
)
from penstock.engine.stage import Before, Stage
from penstock.engine.sums import Adding, OrderedSum, Sum
from penstock.engine.turns import Turns
from penstock.engine.twins import Twins
from penstock.errors import InputError
from penstock.links.link import Gradients, Roots, Sink, Source, Values
from penstock.plan.shares import dealt


class InOrder:
    """What the replicas of a stage have in common.

    Args:
        make: makes turns that begin with a number; in all replicas the same in the same order.
        adding: see `OrderedSum`.
        gathering: where gradients are added if some replicas are on other devices than the first.

    Attributes:
        sums: the turns of their gradients.
        adding: see `OrderedSum`.
        gathering: see above.
        norms: its BatchNorms, if their running statistics are those of the whole batch.
    """

    TURNS = 3  # that are made at once; more with every module that has turns

    def __init__(
        self,
        make: Callable[[int], Turns],
        adding: Adding = nullcontext,
        gathering: Gathering | None = None,
    ) -> None:
        self.sums = make(0)
        self.adding = adding
        self.gathering = gathering
        self.norms = BatchNorms()
        self._make = make
        self._current = threading.local()
        self._calls: dict[int, Counter[nn.Module]] = {}  # by the identity of a way's spans
        self._called: dict[nn.Module, None] = {}  # on all ways, in the same order everywhere
        self._users: dict[object, set[nn.Module | None]] = {}  # of what forwards remember
        self._turns: dict[nn.Module, Turns] = {}
        self._twins: dict[int, Twins] = {}  # by the identity of a way's spans
        self._twins_of: dict[nn.Module, Twins] = {}
        self._changing: dict[int, list[torch.Tensor]] = {}  # on any way, by the identity of twins
        self._uses: dict[nn.Module | None, _Uses] = defaultdict(_Uses)  # `None`: whole forwards
        self._forwards = make(0)
        self._one_by_one = False  # whether whole forwards have turns
        self._ends = make(0)
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}

    def add(self, spans: Sequence[Span], first: int) -> None:
        """Note what the modules of one more way remember from call to call.

        Args:
            spans: of the stage.
            first: the number of the first micro-batch that may take it.
        """
        calls: Counter[nn.Module] = Counter()
        for span in spans:
            span.keep_apart()
            found = calls_of(span.module)
            users = _users_of_memories(span, found)
            if span.recompute and not span.apart.issuperset(chain(*users.values())):
                raise InputError(
                    "a forward changes buffers, attributes or generators of modules that are to "
                    'be recomputed, which would disturb other replicas; use recompute="none", or '
                    "replicas=1"
                )
            for thing, own in users.items():
                self._users.setdefault(thing, set()).update(own)
            calls += found
        self._calls[id(spans)] = calls
        self._called |= dict.fromkeys(calls)
        waiting = set().union(*self._users.values())
        self._one_by_one = any(len(of_one) > 1 or None in of_one for of_one in self._users.values())
        turns = dict(self._turns)
        for module in self._called:
            if module in waiting and module not in turns:
                turns[module] = self._make(first)
        self._turns = turns  # another one: workers may be going through the former

    def add_twins(self, spans: Sequence[Span], originals: Sequence[Span], twins: Twins) -> None:
        """Note what a replica on another device runs on a way, after `add`.

        Args:
            spans: of the replica.
            originals: that they are twins of.
            twins: the modules.
        """
        self._calls[id(spans)] = self._calls[id(originals)]
        self._twins[id(spans)] = twins
        self._changing.setdefault(id(twins), []).extend(t for span in spans for t in span.changing)
        self._twins_of = {**self._twins_of, **dict.fromkeys(twins.modules(), twins)}

    def begin(self, share: Sequence[int], before: Before, count: int) -> None:
        """A replica begins a pass.

        Args:
            share: its micro-batches.
            before: what came before the pass.
            count: how many micro-batches the pass has.
        """
        for turns in self._every_turns():
            turns.begin([before.forwards + k for k in share], before.forwards + count)
        self.sums.begin([before.backwards + k for k in share], before.backwards + count)

    def wait_for(self, before: Before) -> None:
        """Wait until all replicas have run these forwards."""
        self._forwards.wait(before.forwards)

    @contextmanager
    def forward(self, number: int, spans: Sequence[Span]) -> Iterator[None]:
        """Around the forward of a stage in the thread of a replica.

        Args:
            number: of the micro-batch, among all that were ever run.
            spans: that it runs; the object that `add` was given.
        """
        twins = self._twins.get(id(spans))
        self._current.spans = spans
        if self._one_by_one:
            self._forwards.wait(number)
            self._fetch(twins, None)
        self._current.number, self._current.left = number, Counter(self._calls[id(spans)])
        try:
            yield
        finally:
            self._current.number = None
        if self._one_by_one:
            self._give_back(twins, None)
        for turns in self._every_turns():
            turns.done(number)

    @contextmanager
    def end(self) -> Iterator[None]:
        """Around what the user's loss makes of a micro-batch, within its `forward`."""
        self._ends.wait(self._current.number)
        yield
        self._ends.done(self._current.number)

    def _every_turns(self) -> Iterator[Turns]:
        yield self._ends
        yield from self._turns.values()
        yield self._forwards

    def watch(self) -> None:
        """Let modules that remember something wait for their turns, until `unwatch`.

        All other hooks of theirs come after these, so that they are called in turn as well:
        weight norms and spectral norms make weights there, `norms` lends buffers.
        """
        for module in self._turns.keys() - self._handles.keys():
            self._handles[module] = [
                module.register_forward_pre_hook(self._before, prepend=True),
                module.register_forward_hook(self._after, always_call=True),
            ]
        self.norms.begin()

    def unwatch(self) -> None:
        """Leave the modules as they were."""
        self.norms.clear()
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles = {}
        self._uses.clear()  # nothing is under way

    def _before(self, module: nn.Module, args: Any) -> None:
        number = getattr(self._current, "number", None)
        if number is None:
            return
        twins = self._twins_of.get(module)
        self._turns[twins.original(module) if twins else module].wait(number)
        if not self._one_by_one:
            self._fetch(twins, module)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        number = getattr(self._current, "number", None)
        if number is None:
            return
        for span in self._current.spans:
            span.refresh()
        twins = self._twins_of.get(module)
        if not self._one_by_one:
            self._give_back(twins, module)
        module = twins.original(module) if twins else module
        self._current.left[module] -= 1
        if self._current.left[module] == 0:  # else at the end of the forward
            self._turns[module].done(number)

    def _fetch(self, twins: Twins | None, module: nn.Module | None) -> None:
        """In a module's turn, let what its forwards change be what the call before has left.

        Args:
            twins: what the replica runs, if it is on another device than the first one.
            module: the module, or its twin; `None` for a whole forward.
        """
        if self.gathering is None:
            return
        uses = self._uses[self._original(twins, module)]
        after = [uses.written] if uses.written is not None else []
        if self._may_change:
            after += uses.read.values()
        if twins is None:
            for event in after:
                self.gathering.wait(event)
        else:
            uses.read[id(twins)] = twins.fetch(self._of(twins, module), after)

    def _give_back(self, twins: Twins | None, module: nn.Module | None) -> None:
        """At the end of the call, let others have it."""
        if self.gathering is None:
            return
        uses = self._uses[self._original(twins, module)]
        if not self._may_change:
            if twins is None:
                uses.read[0] = self.gathering.now()
            return
        own = self.gathering.now() if twins is None else twins.give_back(self._of(twins, module))
        uses.written = own
        uses.read.clear()

    @property
    def _may_change(self) -> bool:
        """Whether forwards on the way of the calling thread change anything."""
        return any(span.changing for span in self._current.spans)

    def _original(self, twins: Twins | None, module: nn.Module | None) -> nn.Module | None:
        return module if twins is None or module is None else twins.original(module)

    def _of(self, twins: Twins, module: nn.Module | None) -> Iterable[torch.Tensor]:
        """The tensors of a twin; of `None`, those of the stage that forwards change."""
        if module is None:
            return self._changing[id(twins)]
        return chain(module.buffers(), module.parameters())


@dataclass
class _Uses:
    """The last calls of a module, on whatever device, of which the originals know.

    Attributes:
        written: when the last call that may change anything has ended.
        read: when others since then have read it, by the identity of twins; 0 for none.
    """

    written: Event | None = None
    read: dict[int, Event] = field(default_factory=dict)


def _takes_hooks(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


def _users_of_memories(
    span: Span, called: Collection[nn.Module]
) -> dict[object, set[nn.Module | None]]:
    """For all that forwards of a span change and find again, the called modules that use it.

    `None` among these stands for a use outside of the calls of modules that can wait for turns.
    """
    stage = span.module
    if not isinstance(stage, nn.Module):
        return {}
    every = set(stage.modules())
    memories: set[object] = {id(tensor) for tensor in span.changing}
    memories |= {id(own) for module in every for _, own in own_generators(module)}
    users: dict[object, set[nn.Module | None]] = {
        memory: set() for memory in (*memories, *span.memories)
    }
    for module in filter(_takes_hooks, called):
        inside = set(module.modules())
        held = {id(tensor) for tensor in (*module.buffers(), *module.parameters())}
        held |= {id(own) for m in inside for _, own in own_generators(m)}
        for memory, found in users.items():
            shares = isinstance(memory, frozenset) and not inside.isdisjoint(memory)
            if shares or memory in held:
                found.add(module)
    read = read_by(stage)
    for memory, found in users.items():
        beside = isinstance(memory, frozenset) and any(
            not any(m in set(user.modules()) for user in found if user) for m in memory & every
        )
        if not found or beside or memory in read:
            found.add(None)
    return users


class Reached(NamedTuple):
    """What a backward comes to.

    Attributes:
        leaves: the leaves, each once.
        nested: whether an autograd Function on the way runs another backward in its own, as those
            of reversible networks and of reentrant checkpoints do.
        functions: the autograd Functions on the way, any of which may hide that it does.
    """

    leaves: list[torch.Tensor]
    nested: bool
    functions: set[type]

    @classmethod
    def of(cls, roots: Iterable[GradientEdge]) -> Reached:
        """What a backward from these roots comes to."""
        nodes = list(history(root.node for root in roots))
        return cls(
            [node.variable for node in nodes if node.name().endswith("AccumulateGrad")],  # type: ignore[attr-defined]
            any(map(nests, nodes)),
            {node._forward_cls for node in nodes if hasattr(node, "_forward_cls")},
        )


class SummedStage(Stage):
    """A stage of a replica: the gradients of its micro-batches are added to those of all replicas.

    Args:
        index, source, sink: as of `Stage`.
        total: the sum that they are added to.
    """

    def __init__(self, index: int, source: Source, sink: Sink, total: Sum) -> None:
        super().__init__(index, (), source, sink)
        self._total = total
        self._first_back = 0
        self._number = 0
        self._sent: list[Any] = []

    def backward(self, microbatch: int) -> None:
        """Run the backward; its gradients are added when those before have been."""
        self._number = self._first_back + microbatch
        super().backward(microbatch)
        sent, self._sent = self._sent, []
        self._total.add(self._number, sent)

    def _backward_of(self, roots: Roots, gradients: Gradients, entry: EntryNode) -> None:
        """Compute the gradients of a span's leaves apart from `.grad`, unless it is its turn.

        If it is, this adds to `.grad` as any backward does. Hooks of a leaf are called with the
        gradient of one micro-batch after the other, before it is added, so then this waits for the
        turn. So it does where a Function runs a backward of its own, which adds to `.grad`.
        """
        has_come = self._total.has_come(self._number)
        if has_come and not self._total.lends:
            self._backward_in_turn(roots, gradients, entry, ())
            return
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if root is not None and gradient is not None
        ]
        if not pairs:
            return
        reached = Reached.of(root for root, _ in pairs)
        leaves = [leaf for leaf in reached.leaves if leaf is not entry.anchor]
        in_turn = (has_come and not reached.functions) or reached.nested
        if in_turn or any(leaf._backward_hooks for leaf in leaves):
            if reached.nested:  # who knows of which graph
                leaves = self._parameters()
            self._backward_in_turn(roots, gradients, entry, leaves)
            return
        if self.wanted is not None:
            chosen = set(map(id, self.wanted))
            leaves = [leaf for leaf in leaves if id(leaf) in chosen]
        wanted = [*leaves, *([] if entry.anchor is None else [entry.anchor])]
        if not wanted:
            return
        starts, values = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        computed = self._computed(starts, wanted, values, reached)
        terms = [(leaf, g) for leaf, g in zip(leaves, computed, strict=False) if g is not None]
        if terms:
            self._sent.append(self._total.send(terms))

    def _backward_in_turn(
        self, roots: Roots, gradients: Gradients, entry: EntryNode, leaves: Sequence[torch.Tensor]
    ) -> None:
        """Add to `.grad` of these leaves as a backward does, when this micro-batch has its turn."""
        earlier, self._sent = self._sent, []
        with self._total.in_turn(self._number, earlier, leaves):
            self._add_directly(roots, gradients, entry)

    def _add_directly(self, roots: Roots, gradients: Gradients, entry: EntryNode) -> None:
        """The backward of a span as on one device, which adds to `.grad`."""
        super()._backward_of(roots, gradients, entry)

    def _computed(
        self,
        starts: Sequence[GradientEdge],
        leaves: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        reached: Reached,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of leaves, apart from `.grad`; `None` for those that are not reached.

        Args:
            starts: where a backward begins.
            leaves: whose gradients it computes.
            values: the gradients with which it begins.
            reached: what it comes to.
        """
        with self._in_autograd():
            return torch.autograd.grad(starts, leaves, values, allow_unused=True)

    def _parameters(self) -> list[torch.Tensor]:
        """All that the stage has, on all ways."""
        modules = (span.module for spans in self.ways for span in spans)
        of_modules = (m.parameters() for m in modules if isinstance(m, nn.Module))
        return list(dict.fromkeys(chain.from_iterable(of_modules)))

    def clear(self) -> None:
        """Let go of everything that a step has left."""
        super().clear()
        self._sent = []
        self._total.clear()


class ReplicaStage(SummedStage):
    """One of several stages that run the same modules; see the module.

    Args:
        index, source, sink: as of `Stage`.
        common: what it has in common with the others.
        replica: whose stage it is.
    """

    def __init__(
        self, index: int, source: Source, sink: Sink, common: InOrder, replica: Replica
    ) -> None:
        twins = replica.twins.get(index)
        self._sum = OrderedSum(common.sums, common.adding)
        self._gathered: GatheredSum | None = None
        if common.gathering is not None:
            self._sum = self._gathered = GatheredSum(common.sums, common.gathering, twins)
        super().__init__(index, source, sink, self._sum)
        self.norms = common.norms
        self._common = common
        self._shares_evenly = len(set(replica.weights)) == 1

    def begin(
        self,
        microbatches: Sequence[MicroBatch],
        wanted: Sequence[nn.Parameter] | None,
        before: Before,
        share: Sequence[int],
    ) -> None:
        """A pass begins; its micro-batches are numbered after those of earlier ones."""
        self.microbatches, self.wanted = microbatches, wanted
        self.first, self._first_back = before.forwards, before.backwards
        self._common.begin(share, before, len(microbatches))

    def end(self) -> None:
        """All gradients are added. BatchNorms are moved when all replicas have ended."""
        self._sum.add_pending()

    def clear_batchnorms(self) -> None:
        """Others may still watch them."""

    def backward(self, microbatch: int) -> None:
        """Run the backward; with equal shares, first add the gradients that were kept.

        So a replica that is early keeps the gradients of one micro-batch at most. Waiting is safe
        with equal shares: all replicas have the same order of actions, so the others run what this
        one waits for before they come to this action. With unequal shares, they might run it after
        an action that waits for this replica; so then nothing is waited for here.
        """
        if self._shares_evenly:
            self._sum.add_kept()
        if self._gathered is not None:
            self._gathered.let_go()
        super().backward(microbatch)

    def _computed(
        self,
        starts: Sequence[GradientEdge],
        leaves: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        reached: Reached,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of leaves, but for those that are on their way already.

        None is before the backward has ended if that may run another one, which may add to it.
        """
        if self._gathered is None or reached.functions - OWN_FUNCTIONS:
            return super()._computed(starts, leaves, values, reached)
        with self._gathered.sending(leaves) as early:
            found = super()._computed(starts, leaves, values, reached)
        self._sent += early.sent
        return [
            None if id(leaf) in early.leaves else gradient
            for leaf, gradient in zip(leaves, found, strict=True)
        ]

    def forward(self, microbatch: int) -> None:
        """Run the spans; modules that remember something wait for their turns."""
        with self._in_order(microbatch):
            super().forward(microbatch)

    def infer(self, microbatch: int) -> None:
        """Run the spans without gradients, likewise."""
        with self._in_order(microbatch):
            super().infer(microbatch)

    def _in_order(self, microbatch: int) -> AbstractContextManager[None]:
        spans = self.ways[self.microbatches[microbatch].way]
        return self._common.forward(self.first + microbatch, spans)


class _LossInOrder:
    """The sink of the last stage: losses are called in the order of micro-batches."""

    def __init__(self, outlet: Outlet, common: InOrder) -> None:
        self._outlet = outlet
        self._common = common

    def send(self, microbatch: int, results: Values) -> Roots:
        """Keep the results, or the loss of them."""
        with self._common.end() if self._outlet.has_loss else nullcontext():
            return self._outlet.send(microbatch, results)

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The gradients of what was sent."""
        return self._outlet.receive_gradients(microbatch)


@dataclass(frozen=True)
class Replica:
    """One of the replicas of a pipeline.

    Attributes:
        number: of it, from 0.
        weights: of all replicas, by which they share the micro-batches.
        first: the number of its first worker.
        common: for every stage that is here what it has in common with those of other replicas;
            empty for the only replica.
        twins: of the stages that are on another device than those of the first replica.
    """

    number: int = 0
    weights: tuple[int, ...] = (1,)
    first: int = 0
    common: Mapping[int, InOrder] = field(default_factory=dict)
    twins: Mapping[int, Twins] = field(default_factory=dict)

    @property
    def of(self) -> int:
        """How many replicas there are."""
        return len(self.weights)

    def share(self, microbatches: int) -> Sequence[int]:
        """Those of so many micro-batches that it runs."""
        return dealt(microbatches, self.weights)[self.number]

    def largest_share(self, microbatches: int) -> int:
        """How many the replica runs that has most of them."""
        return max(map(len, dealt(microbatches, self.weights)))

    def part_of(self, only: int | None, microbatches: int) -> tuple[Sequence[int], int]:
        """Those of so many micro-batches that it runs, and how many another one may run.

        Args:
            only: the replica that runs all of them; `None` if they are dealt to all.
            microbatches: how many there are.
        """
        if only is None:
            return self.share(microbatches), self.largest_share(microbatches)
        return range(microbatches if only == self.number else 0), microbatches

    def stage(self, index: int, source: Source, sink: Sink) -> Stage:
        """A stage without ways."""
        if not self.common:
            return Stage(index, (), source, sink)
        common = self.common[index]
        if isinstance(sink, Outlet):
            sink = _LossInOrder(sink, common)
        return ReplicaStage(index, source, sink, common, self)


ONLY = Replica()
