"""How the micro-batches of a batch are shared among replicas, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

BUCKET = 4 << 20
"""Bytes of parameters whose gradients go from replica to replica in one message, at least one."""

Sums = Literal["shared", "gathered", "chained"]
"""How replicas add up gradients: in one memory, on the devices of the first one in one process, or
along a chain of them."""


@lru_cache
def dealt(microbatches: int, weights: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Deal micro-batches to replicas, each to the one that has least for its weight.

    With equal weights this is round robin. As many micro-batches as the sum of the weights give
    every replica its weight (the method of d'Hondt).

    Args:
        microbatches: how many there are.
        weights: of every replica, at least 1.

    Returns:
        the numbers of the micro-batches of every replica, ascending.
    """
    replicas = range(len(weights))
    if len(set(weights)) == 1:
        return tuple(tuple(range(k, microbatches, len(weights))) for k in replicas)
    shares: list[list[int]] = [[] for _ in weights]
    for number in range(microbatches):
        chosen = min(replicas, key=lambda k: ((len(shares[k]) + 1) / weights[k], k))
        shares[chosen].append(number)
    return tuple(map(tuple, shares))


def blocks(microbatches: int, weights: tuple[int, ...]) -> list[range]:
    """As many micro-batches for every replica as `dealt` gives it, but consecutive ones."""
    counts = weights
    if sum(weights) != microbatches:
        counts = tuple(map(len, dealt(microbatches, weights)))
    ends = list(accumulate(counts, initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def rows_of_replicas(
    rows: Sequence[int], weights: tuple[int, ...], sums: Sums
) -> list[tuple[int, ...]]:
    """The rows of each replica's micro-batches.

    Args:
        rows: of all micro-batches, in order.
        weights: of every replica.
        sums: how they add up gradients: along a chain each has a block of micro-batches, otherwise
            they are dealt one by one.
    """
    shares = blocks(len(rows), weights) if sums == "chained" else dealt(len(rows), weights)
    return [tuple(rows[number] for number in share) for share in shares]
