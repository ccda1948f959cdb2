"""Several items under way at the same time, given out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Ticket = TypeVar("Ticket")
Result = TypeVar("Result")


def stream(
    items: Iterable[Item],
    most: int,
    start: Callable[[Item], Ticket],
    finish: Callable[[Ticket], Result],
    abandon: Callable[[Ticket], None],
) -> Iterator[Result]:
    """The result of each item; later ones are started while the caller still waits for it.

    Args:
        items: taken one by one, as they are started.
        most: that are under way at the same time.
        start: starts one.
        finish: waits for one.
        abandon: waits for one that was started, and is not wanted any more.
    """
    under_way: deque[Ticket] = deque()
    try:
        for item in items:
            if len(under_way) == most:
                yield finish(under_way.popleft())
            under_way.append(start(item))
        while under_way:
            yield finish(under_way.popleft())
    finally:
        for ticket in under_way:
            abandon(ticket)
