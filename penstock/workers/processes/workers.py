"""Processes with a plan: the driver keeps the model, and each of them has its stages of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.cadence import is_power_of_two
from penstock.capture.attributes import find
from penstock.devices.kinds import kind_of
from penstock.devices.settings import TorchSettings
from penstock.devices.streams import with_streams
from penstock.engine.orders import Order, Outcome
from penstock.engine.replicas import InOrder, Replica
from penstock.engine.stage import Before
from penstock.engine.state import Backups
from penstock.errors import InputError, PenstockError
from penstock.links.device_memory import link_in_words
from penstock.links.pickling import Packed
from penstock.links.segment import Segment
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.workers.backend import Role
from penstock.workers.common_jobs import Modes
from penstock.workers.driven import (
    DrivenWorkers,
    bring,
    pack_named,
    packed_changes,
    packed_loss,
)
from penstock.workers.members import members_here
from penstock.workers.memories import SideEffects, check_memories
from penstock.workers.optimizer_parts import (
    Groups,
    Parts,
    own_groups,
    settings_of,
)
from penstock.workers.ownership import Ownership
from penstock.workers.pool import Dispatch, Job, PassTicket
from penstock.workers.processes.jobs import (
    AddWay,
    Build,
    Common,
    End,
    Import,
    MakePart,
    RunLike,
    RunPass,
    linked,
)
from penstock.workers.processes.parts import Access, OutlivingParts, RemoteParts
from penstock.workers.processes.pool import ProcessPool, ProcessSurvivors
from penstock.workers.processes.shared_model import SharedLocation, SharedModel
from penstock.workers.processes.turns import INTEGER
from penstock.workers.processes.worker_model import WorkerModel
from penstock.workers.remembering import Finder, Found, StateKey
from penstock.workers.saving import SaveOrder
from penstock.workers.ways import NewWay, modules_of

_BUILD_TIMEOUT = 120.0  # seconds, most of which the import of torch takes


class ProcessWorkers(DrivenWorkers):
    """Worker processes of this machine; the driver has no stage.

    Args:
        plan: what they run.
        model: whose stages; its tensors are moved to shared memory.
        pool: who runs them; they are dismissed by `close`.
        devices: of every worker.
        timeout: seconds that a pass may take.
        modes: of every process.
        memories: where workers that were there before have shared the model's tensors.
    """

    role = Role(calls_loss=False)
    assumes = True
    why_not_profiled = (
        "torch.profiler does not see other processes, so there is no profile of worker processes: "
        "leave out profile=, or record the same plan with workers='threads'"
    )

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        pool: ProcessPool,
        devices: Sequence[torch.device],
        timeout: float,
        modes: Modes,
        memories: Mapping[int, SharedLocation] | None = None,
    ) -> None:
        self._places = range(plan.workers_per_replica)
        self.ownership = Ownership(plan.placement, plan.replicas)
        self._plan = plan
        self._timeout = timeout
        super().__init__(pool, model)
        self._pool: ProcessPool = pool
        self.board = pool.board
        self.devices = devices
        self.members = members_here(devices, pool.pids, len(self._places))
        self.homes = [devices[worker] for worker in plan.placement]
        pairs = pairwise(plan.placement)
        self.links = [self._link_in_words(a, b) for a, b in pairs]
        self._with_streams = with_streams(devices)
        self._accelerator = kind_of(self._with_streams[0]) if self._with_streams else None
        of_places = devices[: len(self._places)]
        self._shared = SharedModel(of_places, plan.replicas, self._grant, memories)
        self._remotes = [WorkerModel(place, self._shared, model) for place in self._places]
        self._settings = self._sent_settings = modes.settings
        self._settings_changed = False
        self._kinds: dict[tuple[Any, ...], int] = {}  # of orders that the processes have all seen
        self._ran = Before()
        self._turns: list[memoryview] = []  # how far replicas are
        self._backups = Backups()
        self._optimizers = 0
        self._memories: dict[int, Mapping[StateKey, Found]] = {}  # of workers that have some
        self._passes = 0
        self._parts: weakref.WeakSet[RemoteParts] = weakref.WeakSet()
        try:
            self._build(modes)
        except BaseException:
            self.close()
            raise

    def _build(self, modes: Modes) -> None:
        names = {type(module).__module__ for module in self._whole.modules()} - {"__main__"}
        self._pool.give_spares(Import(sorted(names)))
        ends: list[dict[int, End]] = [{} for _ in self.members]
        for first in range(0, len(ends), len(self._places)):
            for k, pair in enumerate(pairwise(self._plan.placement)):
                one, other = (first + place for place in pair)
                if one == other:
                    ends[one][k] = End("local")
                    continue
                devices = self.devices[one], self.devices[other]
                ends[one][k], ends[other][k] = linked(self._pool.grant, one, other, devices)
        common = {number: own for place in self._places for number, own in self._common(place)}
        self._prepare([modes] * len(ends))
        self._prepare(
            [
                Build(self._plan, member, ends[member.number], common.get(member.number))
                for member in self.members
            ]
        )

    def _link_in_words(self, one: int, other: int) -> str:
        """How values get from one place to another."""
        if one == other:
            return "by reference"
        return link_in_words(self.devices[one], self.devices[other])

    def _at(self, place: int) -> range:
        """The workers at this place, replica after replica."""
        return range(place, len(self.members), len(self._places))

    def _grant(self, place: int, fd: int) -> int:
        """Send the workers at a place a file descriptor."""
        return self._pool.grant(fd, *self._at(place))

    def _common(self, place: int) -> Iterator[tuple[int, Common]]:
        """What every worker at a place has in common with the others there."""
        twins = self._at(place)
        if len(twins) == 1:
            return
        stages = self._plan.placement.count(place)
        turns = self._memory_for_turns(place, stages * InOrder.TURNS)
        own, others = {}, {}
        for worker in twins:
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            own[worker] = self._pool.grant(read, worker)
            others[worker] = self._pool.grant(write, *(twin for twin in twins if twin != worker))
            os.close(read)
            os.close(write)
        for worker in twins:
            wakeups = [wakeup for twin, wakeup in others.items() if twin != worker]
            yield worker, Common(own[worker], wakeups, turns)

    def _memory_for_turns(self, place: int, count: int) -> tuple[int, int]:
        """The grant and the size of memory for so many turns of the workers at a place."""
        segment = Segment(max(1, count) * self._plan.replicas * INTEGER)
        self._turns.append(segment.integers())
        grant = self._grant(place, segment.fd)
        segment.close()
        return grant, segment.size

    def _prepare(self, jobs: Sequence[Job]) -> None:
        """Run jobs that import what the user's modules need, and so may take longer than a pass."""
        self._pool.run(jobs, max(_BUILD_TIMEOUT, self._timeout))

    def hold(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """Move what a stage uses to memory that its worker sees."""
        self._remotes[self._plan.placement[stage]].share(tensors)

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        try:
            self.ownership.add(way)
            for place in self._places:
                self._shared.give_up(place, self.ownership.used_elsewhere(place))
            for place in self._places:
                own = self.ownership.parameters[place], self.ownership.buffers[place]
                self._remotes[place].share([*chain.from_iterable(own)])
            self._prepare([self._way(place, way) for place in self._places] * self._plan.replicas)
        except BaseException as error:  # some may know it now, and others not
            self._pool.fail(f"{type(error).__name__} came as its stages were being built")
            raise

    def _way(self, place: int, way: NewWay) -> AddWay:
        remote, placement = self._remotes[place], self._plan.placement
        stages = {k: spans for k, spans in way.stages.items() if placement[k] == place}
        every = modules_of(span for stage in stages.values() for span in stage.spans)
        turns = None
        if self._plan.replicas > 1:
            for stage in stages.values():
                check_memories(stage.spans, self._plan.replicas, self._whole)
            turns = self._memory_for_turns(place, len(every))
        outbox, packages = remote.outbox, remote.packages()
        try:
            packed = outbox.pack(replace(way, stages=stages))
            also = outbox.modules  # that attributes lead to
            modules = remote.add(dict.fromkeys([*every, *also]))
            links = {
                cut - 1: [find(self._whole, name) for name in names.values()]
                for cut, names in way.crossing.items()
                if (placement[cut - 1] == place) != (placement[cut] == place)
                and self._are_cpus(placement[cut - 1], placement[cut])
            }
            return AddWay(packages, packed, outbox.pack(modules), turns, remote.show(links))
        except Exception as error:
            raise InputError(
                f"the stages of worker {place} cannot be sent to its process: "
                f'{type(error).__name__}: {error}. Use workers="threads"'
            ) from error

    def _are_cpus(self, *places: int) -> bool:
        return all(self.devices[place].type == "cpu" for place in places)

    # -- passes ---------------------------------------------------------------------------

    def start(self, order: Order) -> PassTicket:
        """Send all workers a pass."""
        self._pool.check_open()
        self._losses.note(order.loss)
        loss = None if order.loss is None else packed_loss(order.loss, order.what == "train")
        replicas, count = self._plan.replicas, len(order.microbatches)
        order = order.changed(before=self._ran) if replicas > 1 else order
        try:
            backups = [self.ownership.backup(place, order.goes_back) for place in self._places]
            self._backups.begin(order.number, backups)
            forgotten = tuple(self._forgotten)
            self._passes += 1
            jobs: Sequence[Job] = [] if forgotten else self._brief(order)
            if not jobs:
                before, self._sent_settings = (
                    self._sent_settings,
                    TorchSettings.here(self._accelerator),
                )
                self._settings_changed |= self._sent_settings != self._settings
                passes = [self._pass(k, order, loss, forgotten) for k in self._places]
                changes = [each for p in passes for each in (p.training, p.attributes)]
                self.times_sent += (
                    any(n is not None for n in changes) or self._sent_settings != before
                )
                jobs = [
                    passes[member.place].of(Replica(member.replica, self._plan.weights))
                    for member in self.members
                ]
            self._ran = self._ran.and_then(order.what != "backward", order.goes_back, count)
            ticket = PassTicket(self.finish, order)
            with self._starting():
                ticket.dispatch = self._pool.start(jobs, self._timeout)
            for _ in forgotten:
                self._forgotten.popleft()
        except BaseException:
            if self._pool.under_way:  # those before it go on
                self._backups.drop(order.number)
                self._resend()
            else:
                self._undo()
            raise
        return ticket

    def _pass(
        self,
        place: int,
        order: Order,
        loss: Packed | None,
        forgotten: Sequence[tuple[bool, int]],
    ) -> RunPass:
        remote, placement = self._remotes[place], self._plan.placement
        remote.check()
        is_first, is_last = placement[0] == place, placement[-1] == place
        return RunPass(
            order=order.part(is_first, is_last).changed(loss=None, wanted=None),
            loss=loss if is_last else None,
            gradients=None if order.what == "infer" else self._shared.before(place),
            training=remote.training(),
            attributes=packed_changes(remote.changes(), remote.modules),
            forgotten=forgotten,
            settings=self._sent_settings if self._settings_changed else None,
            wanted=self._shared.numbers(place, self.ownership.own(place, order.wanted)),
            reports_memory=self._pool.keeps_survivors and self._looks_at_memories(),
            kind=self._kind(order) if order.assumed else None,
        )

    def _kind(self, order: Order) -> int | None:
        """The number of an order's kind, by which a `RunLike` refers to what it has in common.

        `None` if this order has to be sent as a whole.
        """
        if order.what != "infer" or len(order.microbatches) > 1 or self._plan.replicas > 1:
            return None
        if order.recorded or order.profiled or order.trial or order.again:
            return None
        settings = order.training, order.modes, order.tokens, order.flushes_denormal
        return self._kinds.setdefault((*settings, order.replica), len(self._kinds))

    def _brief(self, order: Order) -> list[Job]:
        """The short jobs of a pass whose model is unchanged; none if more has to be sent."""
        known = len(self._kinds)
        kind = self._kind(order) if order.assumed and not self._memories else None
        if kind is None or kind >= known:
            return []
        ((sizes, key, way, states),) = order.microbatches
        own = None if states is None else (states.taken, states.after, states.first, states.dropped)
        random = key.seed, key.step, key.microbatch
        like = RunLike(kind, order.number, sizes, random, way, own, None, order.weights_since)
        first = replace(like, values=order.values[0])
        jobs: list[Job] = [like for _ in self._places]
        jobs[self._plan.placement[0]] = first
        return jobs

    def is_as_sent(self) -> bool:
        """Whether the processes know the model, and the settings of torch, as they are now.

        Raises:
            InputError: something has changed that cannot be sent to them.
        """
        for remote in self._remotes:
            remote.check()
        is_same = not any(remote.has_changes() for remote in self._remotes)
        return is_same and TorchSettings.here(self._accelerator) == self._sent_settings

    def _looks_at_memories(self) -> bool:
        """Whether this pass reports what forwards have left in modules.

        Always, if they ever have; otherwise passes 1, 2, 4, 8 and so on do.
        """
        return bool(self._memories) or is_power_of_two(self._passes)

    def finish(self, order: Order, current: Dispatch) -> Outcome:
        """Wait for a pass, and let the slots' gradients be those of the model."""
        self._pool.check_under_way(current)
        try:
            gradients = [self._shared.during(k) for k in self._places if order.goes_back]
            parts: list[Outcome] = self._pool.finish(current, self._timeout)
            for place in self._places:
                if order.goes_back:
                    self._shared.after(place, gradients[place])
                seen = [parts[worker].statistics for worker in self._at(place)]
                self._remotes[place].move_batchnorms([each for each in seen if each])
            for worker, part in enumerate(parts):
                if part.memory or (part.memory is not None and worker in self._memories):
                    self._memories[worker] = _kept(part.memory)
            outcome = Outcome.of(parts)
            bring(outcome.buffers, order.loss)
            self._warn_of(outcome.written)
            if not self._pool.under_way:  # else what was sent may not have arrived
                self._shared.confirm()
                for remote in self._remotes:
                    remote.confirm()
            if self._shared.renewed():
                self._release_shared()
            self._backups.drop(order.number)  # last: until then everything can be undone
        except BaseException as error:
            self.give_up(error)
            raise
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
        self._ran = Before()
        for turns in self._turns:
            for k in range(len(turns)):
                turns[k] = 0
        self._resend()

    def _resend(self) -> None:
        """Send the workers everything anew: nobody knows what has reached them."""
        self._kinds.clear()
        self._shared.resend()
        for remote in self._remotes:
            remote.resend()

    # -- what they remember ---------------------------------------------------------------

    def _finders(self) -> list[Finder]:
        remotes = enumerate(self._remotes)
        return [Finder(own.modules, self._shared.tensors(place)) for place, own in remotes]

    @property
    def staying(self) -> int:
        """All workers and spares on CPUs; none if a device has memory of its own."""
        return 0 if self._with_streams else len(self.members) + self._pool.spares

    def survivors(self) -> ProcessSurvivors:
        """The processes that can go on in another pool."""
        survivors = self._pool.survivors()
        survivors.memories = self._shared.memories
        self.close()
        return survivors

    def remembered(self) -> SideEffects:
        """What forwards have left in the processes, according to their last reports."""
        return self._side_effects([self._memories.get(k, {}) for k in range(len(self.members))])

    # -- optimizers -----------------------------------------------------------------------

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer whose parts are in the workers."""
        pack_named("the optimizer's options", (kind, dict(options), settings_of(groups)))
        number, self._optimizers = self._optimizers, self._optimizers + 1
        used = [parts.number for parts in self._parts]
        jobs = []
        try:
            for place, remote in enumerate(self._remotes):
                of_twins = [owners[worker] for worker in self._at(place)]
                remote.share([parameter for owned in of_twins for parameter in owned])
                own = [own_groups(groups, owned) for owned in of_twins]
                packed = remote.outbox.pack((kind, own, dict(options)))
                jobs.append(MakePart(number, remote.packages(), packed, used))
            self._prepare(jobs * self._plan.replicas)
        except BaseException as error:  # some may have their part now, and others not
            self._pool.fail(f"{type(error).__name__} came as an optimizer was being divided")
            raise
        places = [member.place for member in self.members]
        kind_of_parts = OutlivingParts if self._pool.keeps_survivors else RemoteParts
        access = Access(
            places=places,
            shared=self._shared,
            run=self._run,
            ready=self._ready,
            ran=lambda: self._ran,
            grant=self._pool.grant,
        )
        parts = kind_of_parts(number, owners, access)
        self._parts.add(parts)
        return parts

    def _ready(self) -> None:
        """Raise if the workers are gone, or would update memory that the model has left."""
        self._pool.check_open()
        for place in self._places:
            self._shared.check_memory(place)

    def check(self) -> None:
        """Raise if tensors have left the shared memory, or have other hooks than the workers know.

        Raises:
            InputError: some have.
        """
        for place in self._places:
            self._shared.check(place)

    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint, and this process what is left."""
        save.check_remote(self._parts)
        for place in self._places:
            self._shared.check_memory(place)
        return self._write(save, self._shared)

    def _run(
        self,
        jobs: Sequence[Job],
        whole: bool = False,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run one job on each worker.

        Args:
            jobs: by worker.
            whole: do all jobs or none of them, see `Pool.start`.
            timeout: seconds; `None` for the pipeline's.
            meanwhile: called once they have been given out, or could not be.
        """
        try:
            try:
                with self._starting():
                    current = self._pool.start(jobs, timeout or self._timeout, whole)
            finally:
                if meanwhile is not None:
                    meanwhile()
            return self._pool.finish(current, timeout or self._timeout)
        except BaseException as error:
            self._pool.give_up(error)  # what a signal's handler raises may come between the two
            self._resend()
            raise

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """While open, no other thread closes; work that is queued on devices is done first.

        Raises:
            ClosedError: another thread closes the workers.
        """
        for device in self._with_streams:
            kind_of(device).synchronize(device)
        with super()._starting():
            yield

    def close(self) -> None:
        """Dismiss the workers, and wait until they are gone."""
        try:
            if self._may_end():
                with suppress(PenstockError):  # if they are gone, so is what they remember
                    for parts in self._parts:
                        parts.keep()
        finally:
            self._pool.close()
            self.board.close()
            self._release_shared()

    def _release_shared(self) -> None:
        """Give back memory of devices that workers have let go of."""
        if self._accelerator is not None:
            self._accelerator.release_shared()


def _kept(found: Mapping[StateKey, Found]) -> dict[StateKey, Found]:
    """What a worker has reported, in memory of this process."""
    kept = {}
    for key, each in found.items():
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in each.value.tensors]
        kept[key] = each._replace(value=each.value._replace(tensors=tensors))
    return kept
