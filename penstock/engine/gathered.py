"""The ordered sum where replicas are on several devices: gradients are gathered on the first one's.

The gradients of other replicas are copied there bucket by bucket, while the rest of a backward
still runs. All are added on a stream of their own, in the order of micro-batches (`Gathering`). It
waits for copies that arrive and for gradients that are computed there. What computes waits for it
only before memory is used again.

Memory is not given back by `record_stream`: a process that is ahead of its devices would take that
of all micro-batches. Instead gradients are kept, and before its next backward a replica lets its
stream wait for whoever reads those of the one before, which are mostly done (`GatheredSum.let_go`).
So with equal shares a replica takes the memory of one micro-batch's gradients, and as much for the
copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from penstock.devices.kind import Event
from penstock.devices.kinds import kind_of
from penstock.engine.sums import OrderedSum, Terms
from penstock.engine.turns import Turns
from penstock.engine.twins import Sent, Twins
from penstock.plan.shares import BUCKET
from penstock.torch_internals import foreach_add_


class Gathering:
    """Adds gradients of all replicas to `.grad` of parameters, on a stream of its own.

    Args:
        home: the device, on which the first replica computes.

    Attributes:
        stream: on which they are added.
    """

    def __init__(self, home: torch.device) -> None:
        self._home, self._kind = home, kind_of(home)
        self.stream = self._kind.new_stream(home)

    def made_now(self, terms: Terms) -> Sent:
        """Gradients that the calling thread has computed on the parameters' device."""
        return Sent([leaf for leaf, _ in terms], [gradient for _, gradient in terms], self.now())

    def add(self, sent: Sent, accumulate: Callable[[Terms], None]) -> Event:
        """Add gradients to `.grad`, as autograd does.

        Args:
            sent: the gradients.
            accumulate: adds those that only autograd can add, for hooks or for their layouts, on
                the current stream.

        Returns:
            when they are added.
        """
        terms = list(zip(sent.leaves, sent.gradients, strict=True))
        unusual = [term for term in terms if not _is_usual(*term)]
        if unusual:
            with self.aside():
                self.wait(sent.ready)
                accumulate(unusual)
            chosen = {id(leaf) for leaf, _ in unusual}
            terms = [term for term in terms if id(term[0]) not in chosen]
        # The memory belongs to the stream that computes, as any gradient's; so that waits here.
        first = [(leaf, _like(leaf), g) for leaf, g in terms if leaf.grad is None]
        if first:
            self.stream.wait_event(self.now())
        self.stream.wait_event(sent.ready)
        with self._kind.using(self.stream), torch.no_grad():
            sums = [(leaf.grad, g) for leaf, g in terms if leaf.grad is not None]
            for leaf, total, gradient in first:
                total.copy_(gradient)
                leaf.grad = total
            if sums:
                foreach_add_(*map(list, zip(*sums, strict=True)))
        return self.stream.record_event()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While open, the calling thread adds to gradients, on its current stream."""
        self.wait(self.stream.record_event())
        try:
            yield
        finally:
            self.stream.wait_event(self.now())

    def now(self) -> Event:
        """What the calling thread has put on its current stream, at home, so far."""
        return self._kind.current_stream(self._home).record_event()

    def wait(self, event: Event) -> None:
        """Let what follows on the calling thread's current stream, at home, wait."""
        self._kind.current_stream(self._home).wait_event(event)


def _is_usual(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a plain addition is all that autograd would do."""
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return False
    if leaf.grad is not None:
        return leaf.grad.layout is gradient.layout is torch.strided
    return leaf.layout is gradient.layout is torch.strided and leaf.dtype == gradient.dtype


@torch.no_grad()
def _like(leaf: torch.Tensor) -> torch.Tensor:
    """Memory for its gradient, with strides as autograd gives them."""
    found = torch.empty_like(leaf)
    if found.stride() == leaf.stride():
        return found
    return torch.empty_like(leaf, memory_format=torch.contiguous_format)


class GatheredSum(OrderedSum):
    """The part of a replica, if some are on other devices than the first one.

    Args:
        turns: of the micro-batches.
        gathering: adds gradients on the first replica's device.
        twins: what this replica runs, if it is on another device.
    """

    def __init__(self, turns: Turns, gathering: Gathering, twins: Twins | None) -> None:
        super().__init__(turns, self._aside)
        self._gathering = gathering
        self._twins = twins
        self._added: deque[tuple[Sent, Event]] = deque()

    def has_come(self, number: int) -> bool:
        """Never: no backward adds to `.grad`, as others may be adding to it then."""
        super().has_come(number)  # which raises if the pass is given up
        return False

    def send(self, terms: Terms) -> Sent:
        """Some gradients of a micro-batch, on their way to the first replica's device."""
        return self._twins.send(terms) if self._twins else self._gathering.made_now(terms)

    @contextmanager
    def sending(self, leaves: Sequence[torch.Tensor]) -> Iterator[Early]:
        """Around a backward that computes gradients of these, each of which is final at once.

        Those on other devices are sent while it runs, if they are more than a bucket.
        """
        early = Early([], set())
        if self._twins is None or _size(leaves) <= BUCKET:
            yield early
            return
        bucket: list[tuple[torch.Tensor, torch.Tensor]] = []
        room = BUCKET

        def computed(leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
            nonlocal room
            if gradient is None:
                return
            early.leaves.add(id(leaf))
            bucket.append((leaf, gradient))
            room -= _size([gradient])
            if room <= 0:
                send()

        def send() -> None:
            nonlocal room
            early.sent.append(self.send(tuple(bucket)))
            bucket.clear()
            room = BUCKET

        handles = [leaf.register_hook(partial(computed, leaf)) for leaf in leaves]
        try:
            yield early
        finally:
            for handle in handles:
                handle.remove()
        if bucket:
            send()

    def let_go(self) -> None:
        """Before a backward: let it wait for what reads earlier gradients, and give these back.

        The last bucket of those from another device is kept, unless it is large: it is being copied
        now.
        """
        while len(self._added) > 1:
            self._let_go_of_next()
        if self._added and (self._twins is None or _size(self._added[0][0].twins) > 2 * BUCKET):
            self._let_go_of_next()

    def add_pending(self) -> None:
        """Add the gradients that were kept, and let what follows wait for all."""
        super().add_pending()
        while self._added:
            self._let_go_of_next()

    def clear(self) -> None:
        """Forget what was not added. Who still reads its memory adds to what is then undone."""
        super().clear()
        self._added.clear()

    def _let_go_of_next(self) -> None:
        sent, added = self._added.popleft()
        if self._twins is None:
            self._gathering.wait(added)
        else:
            self._twins.wait_before_reuse(sent, added)

    def _add_sent(self, sent: Sent) -> None:
        self._added.append((sent, self._gathering.add(sent, self._accumulate)))

    @contextmanager
    def _aside(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around an addition to the gradients of these by a backward, on current streams."""
        lent = nullcontext() if self._twins is None else self._twins.lent(leaves)
        with self._gathering.aside(), lent:
            yield


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors; of those that are sparse, what they would take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Early(NamedTuple):
    """What was sent before a backward has ended.

    Attributes:
        sent: the gradients, as `GatheredSum.send` gives them.
        leaves: the ids of what they are of.
    """

    sent: list[Sent]
    leaves: set[int]
