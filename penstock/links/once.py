"""The ends of a link over which a weight goes once, as long as it is known not to change.

A tied weight crosses with every micro-batch, so that its gradients come back in the order of one
device. It need not be carried every time: within a pass no weight changes, nor between the passes
of one call of `generate`. Later values stand for what came first. Both ends see the same passes in
the same order, and what they carry is lost with a pass that fails; after that `since` is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.links.link import Gradients, Roots, Values, edges

Crossing = Mapping[int, str]
"""For a way the weights among the values of a boundary: the name of each by its place."""


class _Once:
    """What both ends have in common.

    Args:
        link: the end of the link itself.
    """

    def __init__(self, link: Any) -> None:
        self._link = link
        self._crossing: list[Crossing] = []  # by way
        self._ways: Sequence[int] = ()
        self._since = -1
        self._there: dict[str, Any] = {}  # what has gone or come

    def add(self, crossing: Crossing) -> None:
        """Add a way; `crossing` has the weights that cross here in it, by their names."""
        self._crossing.append(crossing)

    def begin(self, ways: Sequence[int], since: int) -> None:
        """Begin a pass.

        Args:
            ways: that its micro-batches take.
            since: the number of the first pass since which no weight has changed; -1 if that is
                not known.
        """
        self._ways = ways
        if since < 0 or since != self._since:
            self.clear()
            self._since = since

    def clear(self) -> None:
        """Let go of what has gone or come."""
        self._since, self._there = -1, {}


class OnceSink(_Once):
    """The earlier stage's end."""

    def send(self, microbatch: int, results: Values) -> Roots:
        """Hand over a micro-batch's values, without weights that have gone before."""
        crossing = self._crossing[self._ways[microbatch]]
        if not crossing:
            roots: Roots = self._link.send(microbatch, results)
            return roots
        sent = list(results)
        for k, name in crossing.items():
            if name in self._there:
                sent[k] = None
            else:
                self._there[name] = True
        self._link.send(microbatch, tuple(sent))
        return edges(results)

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The next micro-batch's gradients; waits for them."""
        gradients: Gradients = self._link.receive_gradients(microbatch)
        return gradients


class OnceSource(_Once):
    """The later stage's end."""

    def receive(self, microbatch: int) -> Values:
        """The next micro-batch's values; waits for them."""
        values: Values = self._link.receive(microbatch)
        crossing = self._crossing[self._ways[microbatch]]
        if not crossing:
            return values
        found = list(values)
        for k, name in crossing.items():
            if found[k] is None:
                kept: torch.Tensor = self._there[name]
                found[k] = kept.detach().requires_grad_(kept.requires_grad)
            else:
                self._there[name] = found[k]
        return tuple(found)

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Hand back the gradients of a micro-batch's values."""
        self._link.send_gradients(microbatch, gradients)
