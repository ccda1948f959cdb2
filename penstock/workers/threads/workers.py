"""Threads with a plan: all of them run the user's own modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.board.activity import Activity
from penstock.board.memory import Record
from penstock.board.runs import new_board
from penstock.capture.trees import map_leaves, tree_leaves
from penstock.devices.streams import Handover, with_streams
from penstock.engine.batchnorm import move
from penstock.engine.dealing import Dealer
from penstock.engine.ends import to_device
from penstock.engine.gathered import Gathering
from penstock.engine.orders import Order, Outcome
from penstock.engine.replicas import InOrder, Replica
from penstock.engine.residents import Residents
from penstock.engine.stage import Before
from penstock.engine.state import Backup, Backups
from penstock.engine.turns import AllTurns
from penstock.engine.twins import Twins
from penstock.errors import InputError
from penstock.links.local import Aborted, LocalLink
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.torch_internals import has_function_modes
from penstock.workers.assembly import Assembly
from penstock.workers.backend import Workers
from penstock.workers.gate import BusyError, Gate, busy
from penstock.workers.members import Member, members_here
from penstock.workers.optimizer_parts import Groups, LocalParts, Parts
from penstock.workers.ownership import Ownership
from penstock.workers.pool import Dispatch, PassTicket
from penstock.workers.saving import TIMEOUT, SaveOrder
from penstock.workers.thread_pool import ThreadPool
from penstock.workers.ways import NewWay


class ThreadWorkers(Workers):
    """Threads of this process: all run the user's own modules.

    Args:
        plan: what they run.
        devices: of the workers.
        threads: intra-op threads of each CPU worker.
        timeout: seconds that a pass may take.
        gate: of the model whose modules they run.
        in_caller: whether the only worker's passes are run by the thread that waits for them.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[torch.device],
        threads: int,
        timeout: float,
        gate: Gate,
        in_caller: bool = False,
    ) -> None:
        self._plan = plan
        self._in_caller = in_caller
        self.devices = devices
        self._timeout = timeout
        self.ownership = Ownership(plan.placement, plan.replicas, devices)
        self._per_replica = count = plan.workers_per_replica
        self.members = members_here(devices, per_replica=count)
        self.homes = homes = [devices[worker] for worker in plan.placement]
        self._records: dict[int, Record] = {}  # by the thread that writes them
        self._turns = AllTurns(self._records)
        self._gate = gate
        self._with_streams = with_streams(devices)
        self._twins = _twins(devices, count)
        self._gatherings = {
            place: Gathering(devices[place])
            for place in dict.fromkeys(number % count for number in self._twins)
        }
        shared = {
            index: InOrder(self._turns.make, gathering=self._gatherings.get(place))
            for index, place in enumerate(plan.placement if plan.replicas > 1 else ())
        }
        self._replicas = [
            Replica(k, plan.weights, k * count, shared, self._twins_of_stages(k))
            for k in range(plan.replicas)
        ]
        self._in_order = list(shared.values())
        self._ran = Before()
        self._ready: Barrier | None = None  # where jobs that change weights wait for passes
        self._handovers: dict[int, Handover] = {}  # of the passes under way
        self._dealers: dict[int, Dealer] = {}  # of those that deal micro-batches
        self._links = [
            {
                k: LocalLink(*(devices[member] for member in pair))
                for k, pair in enumerate(pairwise(replica.first + w for w in plan.placement))
            }
            for replica in self._replicas
        ]
        self._ends = [self._ends_of(member) for member in self.members]
        self.links = ["by reference" if a == b else f"copied {a}>{b}" for a, b in pairwise(homes)]
        self._assemblies: dict[bool, list[Assembly]] = {}
        self._residents = [{w: Residents() for w in range(count)} for _ in self._replicas]
        self.board = new_board(len(devices))
        self._backups = Backups()
        self._pool = ThreadPool(devices, threads, self._abort, self._reset, self._doing)

    def _ends_of(self, member: Member) -> list[tuple[LocalLink, bool]]:
        """The links at a worker's stages, each with whether the worker sends results over it."""
        return [
            (link, stage == k)
            for k, link in self._links[member.replica].items()
            for stage in (k, k + 1)
            if self._plan.placement[stage] == member.place
        ]

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        if way.training not in self._assemblies:
            places = range(self._per_replica)
            self._assemblies[way.training] = [
                Assembly(
                    *(self._plan, self.devices[k * len(places) :], links, places),
                    self._replicas[k],
                    self._residents[k],
                    self._gate,
                )
                for k, links in enumerate(self._links)
            ]
        for index, common in enumerate(self._in_order):
            common.add(way.stages[index].spans, self._ran.forwards)
        own = [self._way_of(replica, way) for replica in self._replicas]  # all, or none
        for assembly, of_replica in zip(self._assemblies[way.training], own, strict=True):
            assembly.add(of_replica)
        self.ownership.add(way)

    def _twins_of_stages(self, replica: int) -> dict[int, Twins]:
        """The twins that a replica's stages run, by stage."""
        found = enumerate(self._plan.placement)
        members = {index: replica * self._per_replica + place for index, place in found}
        return {k: self._twins[own] for k, own in members.items() if own in self._twins}

    def _way_of(self, replica: Replica, way: NewWay) -> NewWay:
        """A way as a replica runs it: with twins where it has other devices than the first one."""
        stages = dict(way.stages)
        for index, twins in replica.twins.items():
            if way.deferred:
                raise InputError(
                    'batchnorm="deferred" with replicas on several devices is not possible in one '
                    'process; use batchnorm="microbatch", replicas=1, or torchrun'
                )
            spans = twins.spans(stages[index].spans)
            self._in_order[index].add_twins(spans, stages[index].spans, twins)
            stages[index] = replace(stages[index], spans=spans)
        return replace(way, stages=stages)

    def start(self, order: Order) -> PassTicket:
        """Give every thread its part of a pass."""
        order = order.changed(before=self._ran)
        backups = self._before_replicas(order)
        handover = Handover(self._with_streams)
        fresh = not self._handovers
        dealer = None
        if self._may_deal(order):
            dealer = self._dealers[order.number] = Dealer(len(order.microbatches))
        jobs = [  # in the script's context, of which each thread needs a copy of its own
            partial(copy_context().run, self._pass, member, order, handover, fresh, dealer)
            for member in self.members
        ]
        self._forget_casts()
        try:
            self._backups.begin(order.number, backups)
            for common in self._in_order:
                common.watch()
            count = len(order.microbatches)
            self._handovers[order.number] = handover
            self._ran = self._ran.and_then(order.what != "backward", order.goes_back, count)
            ticket = PassTicket(self.finish, order)
            here = self._in_caller and order.at_once and not has_function_modes()
            ticket.dispatch = self._pool.start_here(jobs[0]) if here else self._pool.start(jobs)
            return ticket
        except BaseException:
            if self._pool.under_way:  # those before it go on
                self._backups.drop(order.number)
                self._handovers.pop(order.number, None)
                self._dealers.pop(order.number, None)
            else:
                self._undo()
            raise

    @property
    def runs_here(self) -> bool:  # type: ignore[override]
        """Whether the calling thread is amid a pass, and so within the user's functions."""
        return self._pool.runs_here

    def _may_deal(self, order: Order) -> bool:
        """Whether replicas take the micro-batches of a pass one by one, instead of equal shares.

        A backward runs where the forward did, and states stay where they are. A pass that is
        recorded is compared with the plan, which has shares.
        """
        plan, is_whole = self._plan, order.what in ("train", "infer") and order.replica is None
        on_cpus = all(device.type == "cpu" for device in self.devices)
        return (
            (plan.replicas > 1 and len(plan.stages) == 1 and len(set(plan.weights)) == 1)
            and (on_cpus and is_whole and not order.recorded)
            and all(microbatch.states is None for microbatch in order.microbatches)
        )

    def _before_replicas(self, order: Order) -> list[Backup]:
        """Backups for a pass, if there are replicas; made before it starts in any worker."""
        places = range(self._per_replica if self._in_order else 0)
        return [self.ownership.backup(place, order.goes_back) for place in places]

    def _pass(
        self,
        member: Member,
        order: Order,
        handover: Handover,
        fresh: bool,
        dealer: Dealer | None,
    ) -> Outcome:
        """One worker's part, in its thread.

        Args:
            member: the worker.
            order: the pass.
            handover: from the caller.
            fresh: whether no other pass was under way when it was ordered, so that the script may
                have changed the model in any way.
            dealer: gives out micro-batches, if they are taken one by one.
        """
        twins = self._twins.get(member.number)
        used = [self.devices[member.number], *([twins.home] if twins else [])]
        gathering = self._gatherings.get(member.place)
        beside = [each.stream for each in (gathering, twins) if each is not None]
        with handover.taken(*used, beside=beside):
            if twins:
                fetched = self._changed_by(member, order)
                twins.refresh(handover.before[twins.home], fresh, fetched)
            outcome = self._own_part(member, order.changed(made=handover.before), dealer)
            if twins:
                twins.wait_for_copies()
            for link, sends in self._ends[member.number]:  # what was sent may be written now
                link.wait_for_copies(results=sends)
            return outcome

    def _changed_by(self, member: Member, order: Order) -> set[int]:
        """The ids of the tensors that forwards of a pass may change in this worker's stages."""
        stages = self._assemblies[order.training][member.replica].stages
        return {
            id(tensor)
            for index, place in enumerate(self._plan.placement)
            if place == member.place
            for way in {microbatch.way for microbatch in order.microbatches}
            for span in stages[index].ways[way]
            for tensor in span.changing
        }

    def _own_part(self, member: Member, order: Order, dealer: Dealer | None) -> Outcome:
        if not self._in_order:
            backup = self.ownership.backup(member.place, order.goes_back)
            self._backups.add(order.number, backup)
        assembly = self._assemblies[order.training][member.replica]
        record = self._records[threading.get_ident()] = self.board.records[member.number]
        wanted = self.ownership.own(member.place, order.wanted)
        if wanted is not None and member.number in self._twins:
            wanted = self._twins[member.number].parameters(wanted)
        return assembly.run(member.place, order.changed(wanted=wanted), record, dealer)

    def finish(self, order: Order, current: Dispatch) -> Outcome:
        """Wait for a pass, and drop the backups by which it could have been undone."""
        self._pool.check_under_way(current)
        try:
            outcome = Outcome.of(self._pool.finish(current, self._timeout))
            self._handovers.pop(order.number).back(partial(self._tensors_of, outcome, order))
            self._dealers.pop(order.number, None)
            if self._twins:
                ends = (self.devices[self._plan.placement[k]] for k in (0, -1))
                _bring(outcome, *ends)
            for common in self._in_order if order.what != "backward" else ():
                first = order.before.forwards
                move(common.norms.take(range(first, first + len(order.microbatches))))
            self._backups.drop(order.number)  # last: until then everything can be undone
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._forget_casts()
            self._unwatch()
        return outcome

    def _tensors_of(self, outcome: Outcome, order: Order) -> list[Any]:
        """What the caller gets from a pass, and may let go of while a device still reads it."""
        results = [*outcome.results.values(), *outcome.losses.values(), *outcome.metrics.values()]
        found = list(tree_leaves([*results, *outcome.gradients.values()]))
        if order.goes_back:
            found += [parameter.grad for parameter in self.ownership.everything()]
        return found

    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them."""
        try:
            self._pool.give_up(why)
        finally:
            self._undo()

    def _undo(self) -> None:
        """Put back what passes have changed that did not come to their end."""
        if self._in_caller:
            self._gate.leave()
        while self._handovers:
            self._handovers.popitem()[1].back()
        self._dealers.clear()
        self._backups.restore()
        for assembly in chain.from_iterable(self._assemblies.values()):
            assembly.clear()
        self._ran = Before()
        self._turns.reset()
        self._unwatch()

    def _unwatch(self) -> None:
        """Take hooks off the user's modules, unless a pass is under way."""
        for common in self._in_order if not self._backups else ():
            common.unwatch()

    def _forget_casts(self) -> None:
        """Forget the weights that autocast has cast, unless a pass is under way."""
        if not self._backups:
            torch.clear_autocast_cache()

    @contextmanager
    def modules_idle(self) -> Iterator[None]:
        """While open, no thread is amid a module."""
        try:
            with self._gate.alone(self._timeout):
                yield
        except BusyError as error:
            if self._pool.under_way:
                try:
                    self._pool.give_up_late(self._timeout)
                finally:
                    self._undo()
            raise busy(self._timeout) from error

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch."""
        for assembly in self._assemblies[training]:
            assembly.forget(number)

    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """The values themselves: nothing is copied."""
        residents = [of_worker for each in self._residents for of_worker in each.values()]
        return {n: value for each in residents for n, value in each.fetch(numbers).items()}

    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of values that stay with the workers."""
        for each in self._residents:
            for residents in each.values():
                residents.drop(numbers)
        for assembly in chain.from_iterable(self._assemblies.values()):
            assembly.let_go_of_weights()

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
        self._together(jobs, TIMEOUT)
        return parts

    def stacks(self) -> Mapping[int, str]:
        """What the threads are doing, with their stacks."""
        return self._pool.describe(self.recorded)

    def _run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        if self._in_caller and not self._pool.under_way and not has_function_modes():
            return [self._pool.run_here(job) for job in jobs]
        self._ready = Barrier(len(jobs)) if self._pool.under_way else None
        jobs = [partial(self._after_passes, self._ready, job) for job in jobs]
        return self._together(jobs, self._timeout, whole=True)

    def _together(
        self, jobs: Sequence[Callable[[], Any]], timeout: float, whole: bool = False
    ) -> list[Any]:
        """Have every worker do a job, and wait."""
        handover = Handover(self._with_streams)

        def taken(device: torch.device, job: Callable[[], Any]) -> Any:
            with handover.taken(device):
                return job()

        pairs = zip(self.devices, jobs, strict=True)
        try:
            return self._pool.run([partial(taken, *pair) for pair in pairs], timeout, whole)
        finally:
            handover.back()

    def _after_passes(self, ready: Barrier | None, job: Callable[[], Any]) -> Any:
        """Do a job that changes weights, when all workers have run the passes before it.

        Args:
            ready: where they wait for each other; `None` if no pass is under way.
            job: what is done.

        Raises:
            Aborted: one of the passes is given up.
        """
        if ready is not None:
            try:
                ready.wait()
            except BrokenBarrierError:
                raise Aborted from None
        for twins in self._twins.values():
            twins.wait_for_copies()
        return job()

    def close(self) -> None:
        """End the threads; waits five seconds for them."""
        self._pool.close()
        self._pool.join(5.0)
        self.board.close()

    def _abort(self) -> None:
        for dealer in tuple(self._dealers.values()):
            dealer.stop()
        for link in chain.from_iterable(links.values() for links in self._links):
            link.abort()
        self._turns.abort()
        if self._ready is not None:
            self._ready.abort()

    def _reset(self) -> None:
        self._ran = Before()
        self._turns.reset()
        for link in chain.from_iterable(links.values() for links in self._links):
            link.reset()

    def _doing(self, worker: int) -> str:
        return str(Activity.of(self.board.records[worker].code))


def runs_in_caller(devices: Sequence[torch.device]) -> bool:
    """Whether the thread that waits for a pass may run it: there is one worker, on a CPU."""
    return [device.type for device in devices] == ["cpu"]


def _twins(devices: Sequence[torch.device], count: int) -> dict[int, Twins]:
    """For every worker on another device than that of its place in the first replica its twins.

    Args:
        devices: of all workers.
        count: how many a replica has.
    """
    return {
        number: Twins(devices[number % count], device)
        for number, device in enumerate(devices)
        if device != devices[number % count]
    }


def _bring(outcome: Outcome, first: torch.device, last: torch.device) -> None:
    """Bring what replicas on other devices have made to those of the first one, in the caller."""

    def to(device: torch.device, values: Any) -> Any:
        return map_leaves(lambda leaf: to_device(leaf, device), values)

    outcome.results = {k: to(last, values) for k, values in outcome.results.items()}
    outcome.losses = {k: to(last, loss) for k, loss in outcome.losses.items()}
    outcome.metrics = {k: to(last, found) for k, found in outcome.metrics.items()}
    outcome.gradients = {k: to(first, values) for k, values in outcome.gradients.items()}
