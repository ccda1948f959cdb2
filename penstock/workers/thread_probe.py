"""Links between threads, measured for workers of all kinds that are not there before the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from penstock.links.local import LocalLink
from penstock.workers.probe import adding_here, overhead_here, ping, pong
from penstock.workers.thread_pool import ThreadPool

_GRACE = 10.0  # seconds that its threads have to end
_TIMEOUT = 60.0  # seconds for a link; it takes milliseconds, unless the machine is very busy


class ThreadProbe:
    """Measures links with threads that it starts for the purpose."""

    kind = "thread"

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """On one device a reference is enough."""
        return one != other

    def overlaps(self, one: torch.device, other: torch.device) -> bool:
        """Always: a reference is handed over, or a copy has streams of its own."""
        return True

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """The seconds there and back through a `LocalLink`, by round."""
        link = LocalLink(one, other)
        jobs = (lambda: ping(link, one, size, rounds), lambda: pong(link, other, rounds))
        found: list[float] = _run((one, other), jobs, link.abort, link.reset)[0]
        return found

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """The larger overhead of two threads that are linked."""
        link = LocalLink(one, other)
        jobs = (lambda: overhead_here(0, link, one), lambda: overhead_here(1, link, other))
        return float(max(_run((one, other), jobs, link.abort, link.reset)))

    def adding(self, one: torch.device, other: torch.device) -> float:
        """The larger cost of adding in order, of two threads at the same time."""
        jobs = [partial(adding_here, device) for device in (one, other)]
        return float(max(_run((one, other), jobs, _nothing, _nothing)))


def _nothing() -> None:
    """Neither waits for the other."""


def _run(
    devices: Sequence[torch.device],
    jobs: Sequence[Callable[[], Any]],
    abort: Callable[[], None],
    reset: Callable[[], None],
) -> list[Any]:
    """Run one job on a worker of each device."""
    pool = ThreadPool(devices, threads=1, abort=abort, reset=reset)
    try:
        return pool.run(jobs, _TIMEOUT)
    finally:
        pool.close()
        pool.join(_GRACE)
