"""Threads with a plan: all of them run the user's own modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.engine.backup import Backups
from penstock.engine.orders import Order, Outcome
from penstock.links.local import LocalLink
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.workers.assembly import Assembly, doing
from penstock.workers.backend import Workers
from penstock.workers.optimizer_parts import Groups, LocalParts, Parts
from penstock.workers.ownership import Ownership
from penstock.workers.pool import Dispatch
from penstock.workers.saving import TIMEOUT, SaveOrder
from penstock.workers.threads.pool import ThreadPool
from penstock.workers.ways import NewWay


class ThreadWorkers(Workers):
    """Threads of this process: all run the user's own modules.

    Args:
        plan: what they run.
        devices: of the workers.
        threads: intra-op threads of each CPU worker.
        timeout: seconds that a pass may take.
    """

    def __init__(
        self, plan: Plan, devices: Sequence[torch.device], threads: int, timeout: float
    ) -> None:
        self._plan = plan
        self.devices = devices
        self._timeout = timeout
        self.ownership = Ownership(plan.placement)
        self.homes = homes = [devices[worker] for worker in plan.placement]
        self._links = {k: LocalLink(a, b) for k, (a, b) in enumerate(pairwise(homes))}
        self.links = ["by reference" if a == b else f"copied {a}>{b}" for a, b in pairwise(homes)]
        self._assemblies: dict[bool, Assembly] = {}
        self._positions = [[0] for _ in devices]
        self._backups = Backups()
        self._pool = ThreadPool(devices, threads, self._abort, self._reset, self._doing)

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        if way.training not in self._assemblies:
            assembly = Assembly(self._plan, self.devices, self._links, range(len(self.devices)))
            self._assemblies[way.training] = assembly
        self._assemblies[way.training].add(way)
        self.ownership.add(way)

    def start(self, order: Order) -> tuple[Order, Dispatch]:
        """Tell all workers to run a pass."""
        jobs = [partial(self._pass, worker, order) for worker in range(len(self.devices))]
        self._forget_casts()
        try:
            self._backups.begin(order.number)
            return order, self._pool.start(jobs)
        except BaseException:
            if self._pool.under_way:  # those before it go on
                self._backups.drop(order.number)
            else:
                self._undo()
            raise

    def _pass(self, worker: int, order: Order) -> Outcome:
        """One worker's part, in its thread."""
        backward = order.what in ("train", "backward")
        self._backups.add(order.number, self.ownership.backup(worker, backward))
        assembly = self._assemblies[order.training]
        part = replace(order, wanted=self.ownership.own(worker, order.wanted))
        return assembly.run(worker, part, self._positions[worker])

    def finish(self, ticket: tuple[Order, Dispatch]) -> Outcome:
        """Wait for a pass, and drop the backups by which it could have been undone."""
        order, current = ticket
        self._pool.check_under_way(current)
        try:
            outcome = Outcome.of(self._pool.finish(current, self._timeout))
            self._backups.drop(order.number)  # last: until then everything can be undone
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._forget_casts()
        return outcome

    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them."""
        try:
            self._pool.give_up(why)
        finally:
            self._undo()

    def _undo(self) -> None:
        """Put back what passes have changed that did not come to their end."""
        self._backups.restore()
        for assembly in self._assemblies.values():
            assembly.clear()

    def _forget_casts(self) -> None:
        """Forget the weights that autocast has cast, unless a pass is under way."""
        if not self._backups:
            torch.clear_autocast_cache()

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch."""
        self._assemblies[training].forget(number)

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer whose parts share its state."""
        return LocalParts(kind, groups, options, owners, self._run)

    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint."""
        save.check_remote()
        parts = save.parts()
        jobs = [save.job(part, own) for part, own in zip(parts, save.portions, strict=True)]
        self._pool.run(jobs, TIMEOUT)
        return parts

    def _run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._pool.run(jobs, self._timeout, whole=True)

    def close(self) -> None:
        """End the threads; waits five seconds for them."""
        self._pool.close()
        self._pool.join(5.0)

    def _abort(self) -> None:
        for link in self._links.values():
            link.abort()

    def _reset(self) -> None:
        for link in self._links.values():
            link.reset()

    def _doing(self, worker: int) -> str:
        return doing(self._positions[worker][0])
