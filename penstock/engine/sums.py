"""The ordered sum of gradients: those of micro-batches are added in their order, as on one device.

A replica computes those of a micro-batch apart from `.grad`. `OrderedSum` adds them there through
autograd's own accumulation, when all before have been added. Who is early keeps those of one
micro-batch, and goes on until the next backward. Where replicas are on several devices,
`GatheredSum` (`gathered.py`) is used instead, and on ranks `ChainedSum`
(`penstock/workers/ranks/ring.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from penstock.engine.turns import Turns

Terms = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Leaves of autograd's graph, each once, and what is to be added to the `.grad` of each."""


class Sum(Protocol):
    """Adds the gradients of a replica's micro-batches to those of all replicas, in order.

    Attributes:
        lends: whether leaves have the sum in `.grad` only within `in_turn`, which has to know them.
    """

    lends: bool

    def has_come(self, number: int) -> bool:
        """Whether `.grad` has the sum of all micro-batches before this one.

        Then its backward may add to it itself, as on one device; see `in_turn`.
        """

    def send(self, terms: Terms) -> Any:
        """Some gradients of a micro-batch, on their way to where they are added."""

    def add(self, number: int, sent: Sequence[Any]) -> None:
        """Add the gradients of a micro-batch, or keep them if it is not its turn yet."""

    def in_turn(
        self, number: int, earlier: Sequence[Any], leaves: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Around a backward that adds to `.grad` itself, see `OrderedSum.in_turn`."""

    def clear(self) -> None:
        """Forget what was not added."""


Adding = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""Around an addition to the gradients of these leaves: they are those of all replicas."""


class OrderedSum:
    """A replica's part of a sum: the gradients of its micro-batches, each added in its turn.

    Args:
        turns: of the micro-batches; one is done when its gradients have been added.
        adding: lets `.grad` of leaves be the sum so far, where replicas do not have it in common.
    """

    def __init__(self, turns: Turns, adding: Adding = nullcontext) -> None:
        self.turns = turns
        self.adding = adding
        self.lends = adding is not nullcontext
        self._early: deque[tuple[int, Sequence[Any]]] = deque()
        self._aliases: dict[int, torch.Tensor] = {}  # of leaves, by their ids

    def has_come(self, number: int) -> bool:
        """Whether the gradients of all micro-batches before this one have been added."""
        return self.turns.has_come(number)

    def send(self, terms: Terms) -> Any:
        """Some gradients of a micro-batch, on their way to where they are added."""
        return terms

    def add(self, number: int, sent: Sequence[Any]) -> None:
        """Add the gradients of a micro-batch, or keep them if it is not its turn yet.

        Args:
            number: of the micro-batch; larger than those before.
            sent: what `send` gave, as one device would add it, one after the other.
        """
        self._early.append((number, sent))
        while self._early and self.turns.has_come(self._early[0][0]):
            self._add(*self._early.popleft())

    def add_kept(self) -> None:
        """Add the gradients that were kept, in order; waits for the turn of each micro-batch."""
        while self._early:
            self.turns.wait(self._early[0][0])
            self._add(*self._early.popleft())

    def add_pending(self) -> None:
        """Add the gradients that were kept, and let go of the aliases of leaves."""
        self.add_kept()
        self._aliases.clear()

    @contextmanager
    def in_turn(
        self, number: int, earlier: Sequence[Any], leaves: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Around a backward that adds to `.grad` itself; waits for its micro-batch's turn.

        Args:
            number: of the micro-batch.
            earlier: what it has already sent, which is added before.
            leaves: to whose gradients the backward may add.
        """
        self.add_pending()
        self.turns.wait(number)
        for sent in earlier:
            self._add_sent(sent)
        with self.adding(leaves):
            yield

    def clear(self) -> None:
        """Forget what was not added."""
        self._early.clear()
        self._aliases.clear()

    def _add(self, number: int, sent: Sequence[Any]) -> None:
        for each in sent:
            self._add_sent(each)
        self.turns.done(number)

    def _add_sent(self, sent: Any) -> None:
        """Add gradients that were sent."""
        with self.adding([leaf for leaf, _ in sent]):
            self._accumulate(sent)

    def _accumulate(self, terms: Terms) -> None:
        """Add gradients to `.grad`, with an alias of each leaf alive.

        torch looks up the node that accumulates a leaf's `.grad` under a lock of the leaf. There it
        has to wait for the GIL if only Python has held the leaf, or that node, until then. The
        Function that adds waits for the same lock while it holds the GIL: both would wait for ever
        if the forward of another replica has the lock. An alias and its graph hold the leaf and the
        node from C++. They are made by an operator, which releases the GIL before it waits.
        """
        with torch.enable_grad():
            for leaf, _ in terms:
                if id(leaf) not in self._aliases:
                    self._aliases[id(leaf)] = torch.ops.aten.alias.default(leaf)
        accumulate(terms)


def accumulate(terms: Terms) -> None:
    """Add gradients to `.grad` as a backward does that has come to these leaves.

    Hooks that come after accumulation are called, layouts are as ever.
    """
    if terms:
        leaves, gradients = zip(*terms, strict=True)
        with torch.enable_grad():
            _Given.apply(gradients, *leaves).backward()


class _Given(torch.autograd.Function):
    """A function whose gradients are given: one backward that comes to many leaves.

    As roots of a backward of their own, each leaf would take microseconds of Python.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gradients
