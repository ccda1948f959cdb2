"""Actors with a plan: the script keeps the model, and each of them has its stages of it."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic_ns
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.board.memory import Reading, moved
from penstock.capture.attributes import named_tensors
from penstock.devices.settings import TorchSettings
from penstock.engine.orders import Order, Outcome
from penstock.errors import InputError, PenstockError, closed
from penstock.links.handshake import new_secret, this_machine
from penstock.links.pickling import Outbox, Packed
from penstock.plan import Plan
from penstock.plan.shares import blocks
from penstock.storage.part import Part
from penstock.workers.backend import Role
from penstock.workers.clipping import Clipping
from penstock.workers.common_jobs import Modes
from penstock.workers.driven import (
    DrivenWorkers,
    bring,
    pack_named,
    packed_changes,
    packed_loss,
)
from penstock.workers.following import AttributeChanges, Following, Unchanged
from penstock.workers.members import Member
from penstock.workers.memories import SideEffects
from penstock.workers.optimizer_parts import Groups, Parts, settings_of
from penstock.workers.ownership import Ownership
from penstock.workers.pool import Dispatch, Job
from penstock.workers.ranks.clocks import ClockOffset
from penstock.workers.ray.actor import ActorState
from penstock.workers.ray.copying import Copying, Protection, is_done, leaves_traces, may_be_done
from penstock.workers.ray.jobs import (
    AddWay,
    Clip,
    ClipValue,
    Copied,
    Done,
    DropPasses,
    Enter,
    Fetch,
    FinishPass,
    Introduce,
    Join,
    Leave,
    Listen,
    MakePart,
    StartPass,
    TensorChanges,
    Unscale,
    Update,
)
from penstock.workers.ray.logged_pass import LoggedPass, as_leaf
from penstock.workers.ray.model import DriverModel, ScriptChanges
from penstock.workers.ray.parts import ActorParts
from penstock.workers.ray.pool import ActorPool, ActorSurvivors
from penstock.workers.ray.rewinding import Rewinding, SentAttributes, SentModule
from penstock.workers.ray.watch import ClusterWatch
from penstock.workers.redo import LostWork, Work
from penstock.workers.remembering import Finder
from penstock.workers.saving import SaveOrder
from penstock.workers.ways import NewWay, modules_of

_BUILD_TIMEOUT = 300.0  # seconds; a node may have to prepare an environment first
_MORE = 30.0  # seconds beside those that ranks give each other
_LEAVE = 60.0  # seconds to bring weights at the end
_RATE = 10e6  # bytes a second at which copies come at least
_COPIED = 4  # times the bytes of the model: gradients, and what Adam remembers

Redo = Callable[["RayWorkers"], object]
"""Does a piece of work again, with other workers."""


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A pass that was started.

    Attributes:
        workers: who run it.
        order: the pass.
        started: the jobs that start it.
        protection: of it from being lost, if it has any.
        work: what the log has of it when it is done, if there is no copy after it.
        attributes: of modules that were sent with it, by number, as they were then.
    """

    workers: RayWorkers
    order: Order
    started: Dispatch
    protection: Protection | None
    work: Work | None
    attributes: Mapping[int, SentModule]

    def finish(self) -> Outcome:
        """Wait for it, see `Ticket`."""
        return self.workers.finish(self)


class RayWorkers(DrivenWorkers):
    """Actors of a Ray cluster; the script has no stage.

    Args:
        plan: what they run.
        model: whose stages.
        pool: the actors; they are dismissed by `close`.
        devices: of every worker; all are the CPU.
        timeout: seconds that a pass may take.
        modes: of every actor.
    """

    role = Role(calls_loss=False, has_all_weights=False)
    has_gradients = False
    why_not_profiled = (
        "torch.profiler does not see other processes, so there is no profile of workers in a Ray "
        "cluster: leave out profile=, or record the same plan with workers='threads'"
    )

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        pool: ActorPool,
        devices: Sequence[torch.device],
        timeout: float,
        modes: Modes,
    ) -> None:
        self._plan = plan
        super().__init__(pool, model)
        self._pool: ActorPool = pool
        self._timeout = timeout
        self._places = range(plan.workers_per_replica)
        self.board = pool.board
        self.devices = devices
        self.homes = [devices[worker] for worker in plan.placement]
        self.ownership = Ownership(plan.placement, plan.replicas)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._modules: list[nn.Module] = []  # that actors have, in the order in which they came
        self._settings = modes.settings
        self._settings_changed = False
        self._training: tuple[bool, ...] = ()
        self._changing: dict[bool, dict[int, torch.Tensor]] = {True: {}, False: {}}
        self._leaves_traces = {True: True, False: False}
        self._optimizers = 0
        self._parts: weakref.WeakSet[ActorParts] = weakref.WeakSet()
        self._watch: ClusterWatch | None = None
        self._ahead = ClockOffset()  # of this clock: that of the first worker
        self._copying: Copying | None = None
        self._lost = LostWork()
        self._sent = SentAttributes(model)
        self._holding: dict[int, torch.Tensor] = {}  # for a pass that is run again
        self._is_brought = False  # whether the script has all that the workers have
        self._model = DriverModel(model)
        self._outbox = Outbox(self._model.number)
        self._unchanged = Unchanged(model)
        self._following = Following(self._model.knows)
        try:
            self._build(modes)
        except BaseException:
            self.close()
            raise

    # -- the start ------------------------------------------------------------------------

    def _build(self, modes: Modes) -> None:
        """Have the actors find each other; neighbours are on one node, as far as can be."""
        count = len(self._plan.devices)
        if self._pool.old:
            entering: list[Job] = [Enter(worker) for worker in self._pool.old]
            self._prepare([*entering, *[_idle] * (count - len(entering))])
        found = self._prepare([Introduce([os.path.abspath(entry) for entry in sys.path])] * count)
        nodes = list(dict.fromkeys(node for _, node, _ in found))
        order = sorted(range(count), key=lambda k: nodes.index(found[k][1]))
        self._pool.reorder(order)
        found = [found[k] for k in order]
        secret = new_secret()
        entries = [entry._replace(secret=secret) for entry, _, _ in found]
        places = [(entry, node) for entry, node, _ in found]
        self.members = [
            Member(
                number=worker,
                device=torch.device(entry.device),
                place=worker % len(self._places),
                replica=worker // len(self._places),
                pid=entry.pid,
                host=entry.host,
                kind="actor",
                node=node,
            )
            for worker, (entry, node) in enumerate(places)
        ]
        machines = [entry.machine for entry in entries]
        self._is_near = near = [machine == this_machine() for machine in machines]
        self._pool.know([(*each, here) for each, here in zip(places, near, strict=True)])
        several = len(set(machines)) > 1
        hosts = [address if several else None for _, _, address in found]
        listens = self._prepare(
            [Listen(k, host, several and not k) for k, host in enumerate(hosts)]
        )
        addresses = [address for address, _ in listens]
        self.links = [_link(machines[a], machines[b], a == b) for a, b in self._pairs()]
        self._prepare([modes] * count)
        board = str(self.board.path or "")
        join = Join(
            plan=self._plan,
            entries=entries,
            addresses=addresses,
            port=listens[0][1],
            threads=modes.threads,
            timeout=self._timeout,
            board=board,
            machine=this_machine(),
        )
        self._prepare([join] * count)
        if self._pool.keeps_survivors:
            size = sum({id(t): t.nbytes for _, t in named_tensors(self._whole)}.values())
            patience = _LEAVE + self._timeout + _COPIED * size / _RATE
            self._copying = Copying(self.members, self._pool, self._timeout, patience, size)
        self._watch = self._pool.watch([node for _, node in places])

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return pairwise(self._plan.placement)

    def _prepare(self, jobs: Sequence[Job]) -> list[Any]:
        """Run jobs that import what the user's modules need, and so may take longer than a pass."""
        return self._pool.run(jobs, max(_BUILD_TIMEOUT, self._timeout))

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        try:
            self.ownership.add(way)
            for place in self._places:
                self._model.give_up(place, self.ownership.used_elsewhere(place))
            spans = [span for stage in way.stages.values() for span in stage.spans]
            changing = self._changing[way.training]
            changing.update((id(t), t) for span in spans for t in span.changing)
            self._leaves_traces[way.training] |= any(map(leaves_traces, spans))
            self._prepare(self._of_places(self._way(way)))
        except BaseException as error:  # some may know it now, and others not
            self._pool.fail(f"{type(error).__name__} came as its stages were being built")
            raise

    def _way(self, way: NewWay) -> list[AddWay]:
        """What the workers at every place are sent of a way."""
        held = zip(self.ownership.parameters, self.ownership.buffers, strict=True)
        deliveries = self._model.deliveries([(*mine, *more) for mine, more in held])
        every = modules_of(span for stage in way.stages.values() for span in stage.spans)
        try:
            packed = self._model.sending(lambda: self._outbox.pack(way))
            known = set(map(id, self._modules))
            chosen = dict.fromkeys([*every, *self._outbox.modules])
            new = [m for m in chosen if id(m) in self._paths and id(m) not in known]
            modules = self._model.sending(lambda: self._outbox.pack(new))
        except Exception as error:
            raise InputError(
                f"the stages cannot be sent to their workers: {type(error).__name__}: {error}. "
                'Use workers="threads"'
            ) from error
        self._modules += new
        self._unchanged.add(new, self._model.knows)
        self._following.add(new)
        if self._copying is not None:
            first = len(self._modules) - len(new)
            self._sent.have(self._sent.packed(dict(enumerate(new, first))))
        paths = [self._paths[id(module)] for module in new]
        return [AddWay(delivery, packed, modules, paths) for delivery in deliveries]

    def _of_places(self, jobs: Sequence[Any]) -> list[Any]:
        """For every worker the job of its place."""
        return [jobs[member.place] for member in self.members]

    # -- passes ---------------------------------------------------------------------------

    def start(self, order: Order) -> _Ticket:
        """Send all workers a pass."""
        self._check_open()
        self._is_brought = False
        self._losses.note(order.loss)
        loss = None if order.loss is None else packed_loss(order.loss, order.what == "train")
        try:
            self._unchanged.check()
            self._settings_changed |= TorchSettings.here() != self._settings
            changes = self._changes()
            changed = self._following.changes()
            attributes = packed_changes(changed, self._modules)
            training = self._modes()
            forgotten = tuple(self._forgotten)
            noted = self._model.take_noted()
            protection = self._protect_pass(order, noted, changed)
            before, after = (protection.before, protection.after) if protection else (None, None)
            sent: dict[int, SentModule] = {}
            if self._copying is not None:
                sent = self._sent.packed({number: self._modules[number] for number in changed})
            jobs = [
                self._start_of(member, order, loss, changes[member.place], training, attributes)
                for member in self.members
            ]
            jobs = [replace(j, forgotten=forgotten, before=before, copy=after) for j in jobs]
            try:
                with self._starting():
                    current = self._pool.start(jobs, self._timeout)
            except InputError as error:  # some may have begun, and one job cannot be sent
                self.give_up(error)
                raise
            for _ in forgotten:
                self._forgotten.popleft()
            work = None
            if protection is not None and protection.after is None:
                work = LoggedPass.of(order, self._modules, noted).work()
        except BaseException as error:
            self._give_up_copy()
            self._resend()
            if not isinstance(error, InputError):
                self.give_up(error)
            raise
        return _Ticket(self, order, current, protection, work, sent)

    def _leaves(self, order: Order) -> bool:
        """Whether the workers have something else after a pass than before it."""
        leaves = order.goes_back or order.training or self._leaves_traces[order.training]
        return leaves and not order.trial and not order.again

    def _start_of(
        self,
        member: Member,
        order: Order,
        loss: Packed | None,
        changes: TensorChanges,
        training: Sequence[bool] | None,
        attributes: Packed | None,
    ) -> StartPass:
        """A worker's part of a pass; that of a replica has its own micro-batches' values only."""
        place, placement = member.place, self._plan.placement
        is_first, is_last = placement[0] == place, placement[-1] == place
        part = order.part(is_first, is_last)
        share = self._share(member, order)
        if len(share) < len(order.microbatches):
            values = [v if k in share else () for k, v in enumerate(part.values)]
            part = part.changed(values=values)
        values = [tuple(map(as_leaf, each)) for each in part.values]
        wanted = self.ownership.own(place, order.wanted)
        return StartPass(
            order=part.changed(loss=None, wanted=None, values=values),
            loss=loss if is_last else None,
            changes=changes,
            training=training,
            attributes=attributes,
            forgotten=(),
            contents={n: c for n, c in self._holding.items() if n in self._model.at(place)},
            settings=TorchSettings.here() if self._settings_changed else None,
            wanted=None if wanted is None else self._model.numbers(wanted),
        )

    def _share(self, member: Member, order: Order) -> Sequence[int]:
        """The micro-batches of a pass that a worker's replica runs."""
        count = len(order.microbatches)
        if order.replica is None:
            return blocks(count, self._plan.weights)[member.replica]
        return range(count if order.replica == member.replica else 0)

    def _modes(self) -> tuple[bool, ...] | None:
        """Of every module whether it is in training mode, if workers do not know that yet."""
        now = tuple(module.training for module in self._modules)
        if now == self._training:
            return None
        self._training = now
        return now

    def finish(self, ticket: _Ticket) -> Outcome:
        """Wait for a pass; its gradients stay with the workers."""
        order, protection = ticket.order, ticket.protection
        self._pool.check_under_way(ticket.started)
        current, jobs = None, [FinishPass(order.number, order.name)] * len(self.members)
        seconds = self._seconds(protection)
        try:
            with self._starting():
                current = self._pool.start(jobs, seconds)
            self._pool.finish(ticket.started, seconds)
            found: list[Done] = self._pool.finish(current, seconds)
            outcome = self._taken(order, found)
            self._done(protection, ticket.work)
            self._sent.have(ticket.attributes)
        except BaseException as error:
            self.give_up(error)
            if self._copying is not None:
                self._copying.undone(ticket.work)
            if protection is not None and may_be_done(current, error):
                self._pool.fail(f"{type(error).__name__} came at the end of {order.name}")
            raise
        return outcome

    def _taken(self, order: Order, found: Sequence[Done]) -> Outcome:
        """The outcome of a pass; the script's model notes what the workers have of it."""
        outcome = Outcome.of([done.outcome for done in found])
        self._ahead.note(found[0].now, monotonic_ns())
        if not self._is_near[0]:
            outcome.logs = moved(outcome.logs, self._ahead.least or 0)
        for place in self._places:
            if (present := found[place].present) is not None:
                self._model.have_gradients(place, present)
            self._model.stale.update(found[place].replaced)
        if order.what != "backward" and not order.trial:
            self._model.has_changed(self._changing[order.training].values())
        bring(outcome.buffers, order.loss)
        self._warn_of(outcome.written)
        return outcome

    def give_up(self, why: BaseException) -> None:
        """Give up the passes that are under way, and undo them."""
        self._give_up_copy()
        try:
            self._pool.give_up(why)
            with suppress(PenstockError):  # if they are closed, there is nothing to undo
                self._pool.run([DropPasses()] * len(self.members), _MORE)
        finally:
            self._resend()

    # -- copies ---------------------------------------------------------------------------

    def _changes(self) -> Sequence[TensorChanges]:
        """What the script has done to tensors, for every place."""
        if not self._pool.under_way:
            self._model.resend()  # what was sent and not confirmed was interrupted
        return self._model.changes(len(self._places))

    def _protect_pass(
        self, order: Order, noted: ScriptChanges, attributes: AttributeChanges
    ) -> Protection | None:
        """How a pass is protected from being lost; `None` if nothing would be.

        Args:
            order: the pass.
            noted: what the script has done to tensors.
            attributes: and to attributes.
        """
        copying = self._copying
        if copying is None or not (self._leaves(order) or noted or attributes):
            return None
        goes_back_only = order.what == "backward"
        can_be_logged = (
            noted.is_simple
            and not (attributes or order.trial or order.again)
            and order.microbatches[0].states is None
            and not (goes_back_only and not copying.has_forward(order.number, order.training))
        )
        return copying.protect(can_be_logged, not goes_back_only and not self._pool.under_way)

    def _protect(self, noted: ScriptChanges, redo: Redo | None, changes: bool) -> Protection | None:
        """How other work is protected from being lost; see `_run`."""
        if self._copying is None or not (changes or noted):
            return None
        can_be_logged = noted.is_simple and not (changes and redo is None)
        return self._copying.protect(can_be_logged, False)

    def _seconds(self, protection: Protection | None) -> float:
        """Seconds that work may take which is protected like this."""
        after = protection.after if protection is not None else None
        return self._timeout + _MORE + (after.timeout if after is not None else 0.0)

    def _done(self, protection: Protection | None, work: Work | None) -> None:
        """Work has come to its end, and so has the copy after it."""
        if self._copying is not None and protection is not None:
            self._copying.done(protection, work)
        self._confirm()

    def _give_up_copy(self) -> None:
        if self._copying is not None:
            self._copying.give_up()

    def remembered(self) -> SideEffects:
        """Have here what the copies have, although a worker has died.

        Raises:
            WorkerDied: something is lost, as those that had copies of it have died, too.
        """
        copying, self._copying = self._copying, None  # it is asked once
        if copying is None:
            died = self._pool.death_of(0)
            died.advise("There was no other worker that could have a copy of what it had")
            raise died
        found, current = copying.gathered(), self._model.current()
        for parts in self._parts:
            parts.go_back(found.states)
        since: Sequence[TensorChanges] = ()
        attributes: AttributeChanges = {}
        try:
            since, attributes = self._changes(), self._following.changes()
        finally:  # also if the script has changed what cannot be followed
            rewound = Rewinding(self._model, found, since, self._modules, attributes, self._sent)
            self._lost = LostWork(copying.works, rewound, current)
            with rewound():  # so that the script has it, whatever comes next
                self._is_brought = True  # but for what modules remember
        return self._side_effects(found.memories)

    @property
    def has_log(self) -> bool:
        """Whether the log has work, and the script's model does not have the results yet."""
        return self._copying is not None and not self._is_brought and bool(self._copying.works)

    @property
    def lost_work(self) -> LostWork:
        """What was done since the copy that `remembered` has found."""
        return self._lost

    def survivors(self) -> ActorSurvivors:
        """The actors that can go on in another pool, with what the script's model has."""
        if self._watch is not None:
            self._watch.close()
        self._copying = None
        self._model.stale.clear()
        survivors = self._pool.survivors()
        self._model.close()
        self.board.close()
        return survivors

    def check(self) -> None:
        """Raise if tensors were changed here that the script had older values of."""
        self._model.check()

    def _confirm(self) -> None:
        """What was sent has arrived, unless something else is under way."""
        if not self._pool.under_way:
            self._model.confirm()
            self._following.confirm()

    def _resend(self) -> None:
        """Send the workers everything anew: nobody knows what has reached them."""
        self._training = ()
        self._model.resend()
        self._following.resend()

    def _check_open(self) -> None:
        if self._pool.can_go_on:
            self._pool.check_open()  # if one has died, others can take over
        if self._pool.why_closed is not None and self._is_brought:
            raise closed(self._pool.why_closed)
        if self._pool.why_closed is not None:
            raise closed(self._pool.why_closed, in_actors=True)

    def _run(
        self,
        jobs: Sequence[Job],
        changes: bool = False,
        whole: bool = False,
        timeout: float | None = None,
        redo: Redo | None = None,
    ) -> list[Any]:
        """Run a job on every worker, and wait for all.

        Args:
            jobs: by worker.
            changes: whether the workers have something else afterwards.
            whole: as of `Pool.start`.
            timeout: seconds.
            redo: does the same with other workers; if it is left out and they change something,
                there is a copy of what they have before this returns.
        """
        self._check_open()
        self._is_brought = False
        noted = self._model.take_noted()
        protection = self._protect(noted, redo, changes)
        work = Work(noted.followed_by(redo))
        if protection is not None and protection.after is not None:
            copied = {id(job): Copied(job, protection.after) for job in jobs}
            jobs = [copied[id(job)] for job in jobs]
        seconds = timeout or self._seconds(protection)
        current = None
        try:
            with self._starting():
                current = self._pool.start(jobs, seconds, whole)
            found = self._pool.finish(current, seconds)
            self._done(protection, work)
        except BaseException as error:
            if current is not None and is_done(current, len(jobs)):
                self._done(protection, work)
                raise
            self._resend()
            if protection is not None and (whole or may_be_done(current, error)):
                self._pool.fail(f"{type(error).__name__} came before all workers had done the same")
            raise
        return found

    # -- parameters -----------------------------------------------------------------------

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
        try:
            every = [
                [p for m in self.members if m.place == place for p in owners[m.number]]
                for place in self._places
            ]
            deliveries = self._model.deliveries(every)
            packed = self._outbox.pack((kind, [dict(group) for group in groups], dict(options)))
            jobs = [
                MakePart(
                    number,
                    deliveries[member.place],
                    packed,
                    self._model.numbers(owners[member.number]),
                    used,
                )
                for member in self.members
            ]
            self._prepare(jobs)
        except BaseException as error:  # some may have their part, and others not
            self._pool.fail(f"{type(error).__name__} came as an optimizer was being divided")
            raise
        places = [member.place for member in self.members]
        parts = ActorParts(number, owners, places, self._model, self._run, self._changes)
        self._parts.add(parts)
        return parts

    def _with_changes(self, job: Callable[[TensorChanges], Job]) -> list[Any]:
        """For every worker a job that comes with the changes of its tensors."""
        return self._of_places([job(changes) for changes in self._changes()])

    def _known(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of parameters.

        Raises:
            InputError: one is not the model's.
        """
        for parameter in parameters:
            if not self._model.knows(parameter):
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the model's, whose "
                    "gradients are with workers in a Ray cluster: pass only the model's parameters "
                    "here, and clip others with torch.nn.utils.clip_grad_norm_"
                )
        return self._model.numbers(parameters)

    def clip(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over the gradients of all workers; the same bits."""
        numbers = self._known(parameters)
        found: list[torch.Tensor] = self._run(
            self._with_changes(lambda changes: Clip(numbers, clipping, changes)),
            changes=True,
            redo=lambda workers: workers.clip(parameters, clipping),
        )
        return found[0]

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copies of the workers' gradients."""
        numbers = self._known(parameters)
        found = self._fetched(lambda place: [], self._model.with_gradients)
        every = {number: gradient for _, own in found for number, gradient in own.items()}
        return [every.get(number) for number in numbers]

    def clip_value(
        self, parameters: Sequence[torch.Tensor], clip_value: float, foreach: bool | None
    ) -> None:
        """As `torch.nn.utils.clip_grad_value_`."""
        numbers = self._known(parameters)
        jobs = self._with_changes(lambda changes: ClipValue(numbers, clip_value, foreach, changes))
        self._run(
            jobs,
            changes=True,
            redo=lambda workers: workers.clip_value(parameters, clip_value, foreach),
        )

    def unscale(
        self,
        parameters: Sequence[torch.Tensor],
        inverse: torch.Tensor,
        allows_half: bool,
        unscale: Callable[[], Mapping[torch.device, torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Divide the workers' gradients by the scale of a loss scaler."""
        numbers = self._known(parameters)
        inverse = inverse.clone()
        jobs = self._with_changes(lambda changes: Unscale(numbers, inverse, allows_half, changes))
        found = self._run(
            jobs,
            changes=True,
            redo=lambda workers: workers.unscale(parameters, inverse, allows_half, dict),
        )
        return [scalar for own in found for scalar in own]

    def state(self, model: nn.Module, of: nn.Module) -> dict[str, Any]:
        """The state dict of the model, which is brought up to date; or of a copy that is here."""
        if of is model and self._can_be_asked:
            self._fetch(self._model.stale)
        return of.state_dict()

    def fetch(self, model: nn.Module) -> None:
        """Have the workers' values here, also where the script has changed older ones."""
        self._model.give_up_changes()
        self.state(model, model)

    def refresh(self, model: nn.Module) -> None:
        """Have the weights of the workers in the script's model, if it has older ones."""
        if self._model.stale and self._can_be_asked:
            self._fetch(self._model.stale)

    def bring_values(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have what these tensors hold here, where the actors have changed it."""
        wanted = self._model.stale.intersection(self._model.numbers(tensors))
        if wanted:
            self._fetch(wanted)

    @contextmanager
    def holding(
        self, contents: Iterable[tuple[torch.Tensor, torch.Tensor]], puts_back: bool
    ) -> Iterator[None]:
        """Have passes that are started while this is open find this in the buffers of the actors.

        Whether actors put it back is in the order of a pass.
        """
        known = [(self._model.number(buffer), content) for buffer, content in contents]
        self._holding = {number: content for number, content in known if number is not None}
        try:
            yield
        finally:
            self._holding = {}

    @property
    def _can_be_asked(self) -> bool:
        """Whether the actors, or those that take over for them, have newer values."""
        return self._pool.why_closed is None or self._pool.can_go_on

    def _fetch(self, wanted: Collection[int]) -> None:
        """Have the values that the workers have changed, of tensors with these numbers."""

        def stale(place: int) -> list[int]:
            return [number for number in self._model.stale_at(place) if number in wanted]

        for values, _ in self._fetched(stale, lambda place: []):
            self._model.have(values)

    def _fetched(
        self,
        tensors: Callable[[int], Sequence[int]],
        gradients: Callable[[int], Sequence[int]],
        timeout: float | None = None,
    ) -> list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor | None]]]:
        """Values and gradients from the workers of the first replica, by number.

        Args:
            tensors: for every place the numbers of those whose values are wanted.
            gradients: and of those whose gradients are.
            timeout: seconds.
        """
        changes = self._changes()
        jobs = [Fetch(tensors(place), gradients(place), changes[place]) for place in self._places]
        silent = [replace(job, tensors=(), gradients=()) for job in jobs]
        every = [(silent if m.replica else jobs)[m.place] for m in self.members]
        return self._run(every, timeout=timeout)

    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint, and this process what is left."""
        save.check_remote(self._parts)
        self._run(self._with_changes(Update))
        return self._write(save, _At(self._model))

    # -- what they remember ---------------------------------------------------------------

    def _finders(self) -> list[Finder]:
        return [Finder(self._modules, self._model.tensors)] * len(self._places)

    # -- status ---------------------------------------------------------------------------

    def status(self) -> Mapping[int, Reading]:
        """What members are doing; those on other machines are asked, and have two seconds."""
        found = super().status()
        readings = {number: found[number] for number, near in enumerate(self._is_near) if near}
        far = [number for number in found if number not in readings]
        if far:
            readings |= {number: reading for number, (_, reading) in self._pool.look(far).items()}
        return readings

    def wanted(self) -> int | None:
        """How many workers there should be now, by `Ray.min` and `Ray.max`."""
        return self._watch.wanted() if self._watch is not None else None

    # -- the end --------------------------------------------------------------------------

    def bring(self) -> None:
        """Have in the script all that only the workers have."""
        for parts in self._parts:
            parts.keep()
        model = self._model
        size = sum({id(t): t.nbytes for _, t in named_tensors(self._whole)}.values())
        patience = _LEAVE + 2 * size / _RATE  # weights and gradients
        for values, found in self._fetched(model.stale_at, model.with_gradients, patience):
            model.have(values)
            model.have_real_gradients(found)
        self._is_brought = True

    def _bring_at_last(self) -> None:
        """Bring all that the script does not have, and have the actors leave each other."""
        lost = [] if self._is_brought else self._model.keep_changes()
        if self._pool.why_closed is None:
            copying, self._copying = self._copying, None  # what is brought is not copied first
            try:
                if not self._is_brought:
                    self.bring()
            except PenstockError as error:
                self._copying = copying  # one had died, and nobody had noticed
                if copying is None:
                    _warn_of_loss(error)
            else:
                self._pool.run([Leave()] * len(self.members), _LEAVE)
        if self._pool.can_go_on and self._copying is not None:
            try:
                left = self.remembered()
                with self._lost.rewound():
                    left.bring()
            except PenstockError as error:
                _warn_of_loss(error)
            if count := len(self._lost.works):
                _warn_of_loss(
                    f"the last {count} passes and other pieces of work; a worker has died"
                )
        for tensor in lost:
            warnings.warn(
                f"the script's model has a tensor of shape {tuple(tensor.shape)} that was changed "
                "there while the workers had newer values of it, which are lost as the pipeline is "
                "closed",
                stacklevel=2,
            )

    def close(self) -> None:
        """Bring weights, gradients and optimizer state here, and end the actors."""
        may_end = self._may_end()
        if self._watch is not None:
            self._watch.close()
        try:
            if may_end:
                with suppress(PenstockError):  # if they are gone already, so is what they have
                    self._bring_at_last()
        finally:
            self._model.close()
            self._pool.close()
            self.board.close()


class _At:
    """The tensors whose values workers have, as `divided` wants to know them.

    Args:
        model: the script's.
    """

    def __init__(self, model: DriverModel) -> None:
        self._model = model

    def number(self, place: int, tensor: Any) -> int | None:
        """The number by which the workers at a place know a tensor."""
        return self._model.number_at(place, tensor)

    def names(self, place: int, names: Mapping[int, str]) -> dict[int, str]:
        """The names of tensors by their numbers, out of those by their ids."""
        return self._model.names(names)


def _warn_of_loss(error: object) -> None:
    warnings.warn(f"what was trained is lost as the pipeline is closed: {error}", stacklevel=2)


def _idle(own: ActorState) -> None:
    """A job that does nothing."""


def _link(one: str, other: str, same: bool) -> str:
    if same:
        return "by reference"
    return "shared memory" if one == other else "torch.distributed (gloo)"
