"""How the micro-batches of a batch are shared among replicas, by weight."""

from __future__ import annotations

from functools import lru_cache

BUCKET = 4 << 20
"""Bytes of parameters whose gradients go from replica to replica in one message, at least one."""


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
    shares: list[list[int]] = [[] for _ in weights]
    replicas = range(len(weights))
    for number in range(microbatches):
        chosen = min(replicas, key=lambda k: ((len(shares[k]) + 1) / weights[k], k))
        shares[chosen].append(number)
    return tuple(map(tuple, shares))


def blocks(microbatches: int, weights: tuple[int, ...]) -> list[range]:
    """As many micro-batches for every replica as `dealt` gives it, but consecutive ones."""
    found: list[range] = []
    start = 0
    for share in dealt(microbatches, weights):
        found.append(range(start, start + len(share)))
        start += len(share)
    return found
