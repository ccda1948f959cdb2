"""Ray in tests: a cluster for all tests of a process, and actors that several of them use.

Most of the start of an actor is an import. A test that uses lent actors does not test how they end:
`close()` gives them back. Those that test it start their own (`again=False`, or no `lent_actors`).
"""

from __future__ import annotations

import atexit
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.board.runs import new_board
from penstock.errors import BY_USER
from penstock.workers.ray import backend
from penstock.workers.ray.actor import ActorState
from penstock.workers.ray.cluster import Cluster
from penstock.workers.ray.pool import ActorPool

CPUS = 8  # of the cluster, whatever the machine has
_LOANS = 30  # of the same actors
_PATIENCE = 120.0  # seconds that an actor may take to import torch


def have_ray() -> None:
    """Have a Ray cluster of one node for the rest of this process; skip the test without Ray."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            patch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
            ray.init("local", num_cpus=CPUS, include_dashboard=False, logging_level="ERROR")
            gc.collect()  # files that Ray leaves open, of which another test would be told
        atexit.register(ray.shutdown)


def have_room() -> None:
    """Have a Ray cluster whose CPUs are all free, for actors that are not lent."""
    have_ray()
    drain()


@dataclass(frozen=True)
class Renewed:
    """A job: put everything back."""

    def __call__(self, own: ActorState) -> None:
        own.__init__(own.worker)  # type: ignore[misc]
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


class Lent(ActorPool):
    """Actors that are given back when they are dismissed in good order."""

    loans = 1

    def close(self, why: str = BY_USER) -> None:
        if why != BY_USER:
            super().close(why)
        elif self._closed_because is None and self not in POOL:
            self._open.clear()
            POOL.append(self)

    def really_close(self) -> None:
        super().close()

    def renew(self) -> bool:
        """Make them as new; whether that is so."""
        self.loans += 1
        if self.loans > _LOANS:
            return False
        try:
            self.run([Renewed()] * len(self), _PATIENCE)
        except Exception:  # they have ended
            return False
        self.board = new_board(len(self))
        return True


POOL: list[Lent] = []


def lend(
    cluster: Cluster, count: int, cpus: float, survives: bool = False, survivors: Any = None
) -> ActorPool:
    """Actors that were given back, or new ones; others make room for these."""
    if survives:
        return ActorPool(cluster, count, cpus, survives, survivors)
    while POOL:
        actors = POOL.pop()
        fits = len(actors) == count and not cluster.options.resources
        if fits and actors.renew():
            cluster.leave()
            return actors
        actors.really_close()
    return Lent(cluster, count, cpus)


@contextmanager
def lent_actors(again: bool = True) -> Iterator[None]:
    """Meanwhile, pipelines in a Ray cluster use actors that others have given back.

    Args:
        again: whether they give them back; else the actors really go.
    """
    have_ray()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "ActorPool", lend)
        if not again:
            patch.setattr(Lent, "close", ActorPool.close)
        yield


@atexit.register
def drain() -> None:
    """Let them all go."""
    while POOL:
        POOL.pop().really_close()
