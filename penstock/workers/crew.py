"""Who runs the stages: the same few orders, whatever kind of worker takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.engine.backup import Backup
from penstock.engine.batch import Batch
from penstock.engine.orders import Order, Outcome
from penstock.links.local import LocalLink
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.workers.assembly import Assembly, doing
from penstock.workers.clipping import Clipping
from penstock.workers.optimizer_parts import Groups, LocalParts, Parts
from penstock.workers.pool import Round
from penstock.workers.saving import TIMEOUT, SaveOrder
from penstock.workers.threads.pool import ThreadPool
from penstock.workers.ways import NewWay, Ownership

T = TypeVar("T")


class Crew(Protocol):
    """The workers of a pipeline, with their stages and the links between them.

    Attributes:
        holdings: the tensors that their stages use.
        has_inputs: whether this process gives the first stage its batches.
        has_loss: whether this process gives the last stage targets and the loss.
        shares_modules: whether the loss is called where the user's own modules run.
        has_everything: whether this process has the weights of all stages.
        links: how values get from every stage to the next, in words.
    """

    holdings: Ownership
    has_inputs: bool
    has_loss: bool
    shares_modules: bool
    has_everything: bool

    @property
    def links(self) -> tuple[str, ...]:
        """See above."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients passes leave in this process."""

    def together(self, what: str) -> AbstractContextManager[None]:
        """Something that concerns all workers; where they have no driver, all do it at once."""

    def told(self, make: Callable[[], Batch]) -> Batch:
        """A batch that is made where the inputs are; elsewhere, what there is to know of it."""

    def hold(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """Bring what a stage uses to its worker, as soon as it has values."""

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""

    def start(self, order: Order) -> Any:
        """Tell all workers to run a pass, after those that were started before it.

        Returns:
            a ticket for `finish`.

        Raises:
            ClosedError: they were dismissed.
        """

    def finish(self, ticket: Any) -> Outcome:
        """Wait for a pass. If it fails, all that were started are given up, and undone.

        Raises:
            WorkerError: a stage or the loss failed.
            WorkerTimeout: it took too long; the crew is closed.
        """

    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them, as nobody can `finish` them."""

    def check(self) -> None:
        """Notice what was done to the model's tensors that the workers do not see.

        Raises:
            InputError: something was, and what would work.
        """

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch; may be called from any thread."""

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer whose parts are where the parameters are."""

    def clip(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, wherever the gradients are."""

    def state(self, model: nn.Module, of: nn.Module) -> dict[str, Any]:
        """The state dict of the model, or of a copy of it, wherever its tensors are."""

    @property
    def leads(self) -> bool:
        """Whether this process decides for all."""

    def agreed(self, make: Callable[[], T]) -> T:
        """What the leading process makes, for all; in the midst of an operation."""

    def everyones(self, value: T) -> list[T]:
        """What every process has of something, in the order of workers; this ends the operation.

        Tensors of other processes are on the CPU.
        """

    @property
    def place(self) -> int:
        """Which of `everyones` this process is."""

    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint.

        Returns:
            all parts, which note when they are written, or why they cannot be.
        """

    def all_alive(self) -> bool:
        """Whether, as far as is known here, no worker has ended; may be called from any thread."""

    def close(self) -> None:
        """Dismiss the workers, and wait until they are gone."""


class Driven:
    """What crews have in common whose driver has the whole model."""

    leads = True
    place = 0
    has_inputs = True
    has_loss = True
    shares_modules = True
    has_everything = True
    holdings: Ownership

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients passes leave in this process: all that stages use."""
        return self.ownership.everything()

    def together(self, what: str) -> AbstractContextManager[None]:
        """The driver does it."""
        return nullcontext()

    def check(self) -> None:
        """Workers that have the model itself see everything."""

    def told(self, make: Callable[[], Batch]) -> Batch:
        """The driver has the batch."""
        return make()

    def agreed(self, make: Callable[[], T]) -> T:
        """The driver makes it."""
        return make()

    def everyones(self, value: T) -> list[T]:
        """What the driver has."""
        return [value]

    def clip(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`."""
        return clipping.clip(parameters)

    def state(self, model: nn.Module, of: nn.Module) -> dict[str, Any]:
        """The state dict of the model, or of a copy of it."""
        return of.state_dict()


class ThreadWorkers(Driven):
    """Thread workers of this process: all on the user's own parameters.

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
        self._devices = devices
        self._timeout = timeout
        self.ownership = Ownership(plan.placement)
        homes = [devices[worker] for worker in plan.placement]
        self._links = {k: LocalLink(a, b) for k, (a, b) in enumerate(pairwise(homes))}
        self._assemblies: dict[bool, Assembly] = {}
        self._positions = [[0] for _ in devices]
        self._backups: dict[int, dict[int, Backup]] = {}  # by pass, by worker
        self._workers = ThreadPool(devices, threads, self._abort, self._reset, self._doing)

    @property
    def links(self) -> tuple[str, ...]:
        """How values get from every stage to the next, in words."""
        homes = [self._devices[worker] for worker in self._plan.placement]
        return tuple("by reference" if a == b else f"copied {a}>{b}" for a, b in pairwise(homes))

    def hold(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """They are where its thread sees them."""

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        if way.training not in self._assemblies:
            assembly = Assembly(self._plan, self._devices, self._links, range(len(self._devices)))
            self._assemblies[way.training] = assembly
        self._assemblies[way.training].add(way)
        self.ownership.add(way)

    def start(self, order: Order) -> tuple[Order, Round]:
        """Tell all workers to run a pass."""
        jobs = [partial(self._pass, worker, order) for worker in range(len(self._devices))]
        self._forget_casts()
        try:
            self._backups[order.number] = {}
            return order, self._workers.start(jobs)
        except BaseException:
            if self._workers.under_way:  # those before it go on
                self._backups.pop(order.number, None)
            else:
                self._undo()
            raise

    def _pass(self, worker: int, order: Order) -> Outcome:
        """One worker's part, in its thread."""
        backward = order.what in ("train", "backward")
        self._backups[order.number][worker] = self.ownership.backup(worker, backward)
        assembly = self._assemblies[order.training]
        part = replace(order, wanted=self.ownership.own(worker, order.wanted))
        return assembly.run(worker, part, self._positions[worker])

    def finish(self, ticket: tuple[Order, Round]) -> Outcome:
        """Wait for a pass."""
        order, current = ticket
        self._workers.check_under_way(current)
        try:
            parts = self._workers.finish(current, self._timeout)
            outcome = Outcome.of(parts)
            del self._backups[order.number]  # last: until then everything can be undone
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._forget_casts()
        return outcome

    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them."""
        try:
            self._workers.give_up(why)
        finally:
            self._undo()

    def _undo(self) -> None:
        """Put back what passes have changed that did not come to their end."""
        for number in sorted(self._backups, reverse=True):  # the oldest last
            for backup in self._backups[number].values():
                backup.restore()
        self._backups.clear()
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
        self._workers.run(jobs, TIMEOUT)
        return parts

    def all_alive(self) -> bool:
        """Threads live as long as this process."""
        return True

    def _run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._workers.run(jobs, self._timeout, whole=True)

    def close(self) -> None:
        """Dismiss the workers."""
        self._workers.close()
        self._workers.join(5.0)

    def _abort(self) -> None:
        for link in self._links.values():
            link.abort()

    def _reset(self) -> None:
        for link in self._links.values():
            link.reset()

    def _doing(self, worker: int) -> str:
        return doing(self._positions[worker][0])
