"""Micro-batches that replicas of one stage take one by one, so that a slow one takes fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from penstock.schedule import Action


class Dealer:
    """Gives the micro-batches of a pass to the threads that ask for one, in ascending order.

    The smallest number that is under way never waits for a turn, as all before it are done. So what
    others wait for goes on, whoever has it.

    Args:
        microbatches: how many there are.
    """

    def __init__(self, microbatches: int) -> None:
        self._numbers = count()  # whose next number is taken in one step of the interpreter
        self._end = microbatches

    def stop(self) -> None:
        """Give no more: the pass is given up."""
        self._end = 0

    def __iter__(self) -> Iterator[int]:
        """Those that one thread takes, each when it is done with the one before."""
        while (number := next(self._numbers)) < self._end:
            yield number


def is_one_by_one(actions: Sequence[Action]) -> bool:
    """Whether a worker is done with each micro-batch before it begins the next one."""
    order = [action.microbatch for action in actions]
    return order == sorted(order)
