"""Processes with a plan: the driver keeps the model, and each of them has its stages of it."""

from __future__ import annotations

import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture.trees import flatten
from penstock.devices.choice import threads_per_worker
from penstock.engine.ends import Loss
from penstock.engine.orders import Order, Outcome
from penstock.engine.state import Backups
from penstock.errors import InputError, PenstockError, closed
from penstock.links.pickling import Packed, pack
from penstock.plan import Plan
from penstock.storage.part import Part
from penstock.workers.backend import Role, Workers
from penstock.workers.members import Activity, members_here
from penstock.workers.optimizer_parts import (
    Groups,
    Parts,
    State,
    own_groups,
    settings_of,
    warn_of_no_gradients,
)
from penstock.workers.ownership import Ownership
from penstock.workers.pool import Dispatch, Job
from penstock.workers.processes.following import Remote
from penstock.workers.processes.jobs import (
    AddWay,
    Build,
    End,
    FetchState,
    LoadState,
    MakePart,
    Modes,
    RunPass,
    Step,
    WritePart,
)
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.processes.shared_model import SharedModel
from penstock.workers.saving import TIMEOUT, Portion, SaveOrder
from penstock.workers.ways import NewWay, modules_of

_BUILD_TIMEOUT = 120.0  # seconds, most of which the import of torch takes


class ProcessWorkers(Workers):
    """Worker processes of this machine; the driver has no stage.

    Args:
        plan: what they run.
        model: whose stages; its tensors are moved to shared memory.
        pool: who runs them; they are dismissed by `close`.
        devices: of every worker; all are the CPU.
        timeout: seconds that a pass may take.
        allocator_kept: whether the workers keep freed memory.
    """

    role = Role(calls_loss=False)

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        pool: ProcessPool,
        devices: Sequence[torch.device],
        timeout: float,
        allocator_kept: bool,
    ) -> None:
        count = len(plan.devices)
        self.ownership = Ownership(plan.placement)
        self._plan = plan
        self._count = count
        self._timeout = timeout
        self._pool = pool
        self.devices = devices
        self.members = members_here(devices, pool.pids)
        self.homes = [devices[worker] for worker in plan.placement]
        pairs = pairwise(plan.placement)
        self.links = ["by reference" if a == b else "shared memory" for a, b in pairs]
        self._shared = SharedModel(count, pool.grant)
        self._remotes = [Remote(worker, self._shared, model) for worker in range(count)]
        self._backups = Backups()
        self._forgotten: deque[tuple[bool, int]] = deque()
        self._optimizers = 0
        self._lock = threading.RLock()  # a signal's handler may close, too
        self._starter: int | None = None  # the thread that gave the last jobs
        self._closer: int | None = None  # the one that closes
        self._parts: weakref.WeakSet[_RemoteParts] = weakref.WeakSet()
        try:
            self._build(Modes.here(threads_per_worker(devices), count, allocator_kept))
        except BaseException:
            self.close()
            raise

    def _build(self, modes: Modes) -> None:
        ends: list[dict[int, End]] = [{} for _ in range(self._count)]
        for k, (one, other) in enumerate(pairwise(self._plan.placement)):
            if one == other:
                ends[one][k] = "local", 0
                continue
            here, there = socket.socketpair()
            with here, there:
                ends[one][k] = "sink", self._pool.grant(one, here.fileno())
                ends[other][k] = "source", self._pool.grant(other, there.fileno())
        self._prepare([modes] * self._count)
        self._prepare([Build(self._plan, self._count, own) for own in ends])

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
            self._prepare([self._way(w, way) for w in range(self._count)])
        except BaseException as error:  # some may know it now, and others not
            self._pool.close(f"{type(error).__name__} came as its stages were being built")
            raise

    def _way(self, worker: int, way: NewWay) -> AddWay:
        remote, placement = self._remotes[worker], self._plan.placement
        remote.share((*self.ownership.parameters[worker], *self.ownership.buffers[worker]))
        stages = {k: spans for k, spans in way.stages.items() if placement[k] == worker}
        modules = remote.add(modules_of(span for stage in stages.values() for span in stage.spans))
        part = replace(way, stages=stages)
        try:
            return AddWay(remote.packages(), remote.outbox.pack((part, modules)))
        except Exception as error:
            raise InputError(
                f"the stages of worker {worker} cannot be sent to its process: "
                f'{type(error).__name__}: {error}. Use workers="threads"'
            ) from error

    # -- passes ---------------------------------------------------------------------------

    def start(self, order: Order) -> tuple[Order, Dispatch]:
        """Tell all workers to run a pass."""
        self._pool.check_open()
        loss = None if order.loss is None else _packed_loss(order.loss, order.what == "train")
        backward = order.what in ("train", "backward")
        workers = range(self._count)
        try:
            self._backups.begin(order.number, [self.ownership.backup(w, backward) for w in workers])
            jobs = [self._pass(w, order, loss, tuple(self._forgotten)) for w in workers]
            with self._starting():
                current = self._pool.start(jobs, self._timeout)
            for _ in jobs[0].forgotten:
                self._forgotten.popleft()
        except BaseException:
            if self._pool.under_way:  # those before it go on
                self._backups.drop(order.number)
                self._doubt()
            else:
                self._undo()
            raise
        return order, current

    def _pass(
        self,
        worker: int,
        order: Order,
        loss: Packed | None,
        forgotten: Sequence[tuple[bool, int]],
    ) -> RunPass:
        remote, placement = self._remotes[worker], self._plan.placement
        remote.check()
        is_first, is_last = placement[0] == worker, placement[-1] == worker
        return RunPass(
            order=replace(order.part(is_first, is_last), loss=None, wanted=None),
            loss=loss if is_last else None,
            gradients=None if order.what == "infer" else self._shared.before(worker),
            training=remote.training(),
            attributes=_packed_news(remote),
            forgotten=forgotten,
            wanted=self._shared.numbers(worker, self.ownership.own(worker, order.wanted)),
        )

    def finish(self, ticket: tuple[Order, Dispatch]) -> Outcome:
        """Wait for a pass, and let the slots' gradients be those of the model."""
        order, current = ticket
        backward = order.what in ("train", "backward")
        self._pool.check_under_way(current)
        try:
            for worker in range(self._count if backward else 0):
                self._shared.during(worker)
            parts = self._pool.finish(current, self._timeout)
            if backward:
                for worker, (_, present) in enumerate(parts):
                    self._shared.after(worker, present)
            outcome = Outcome.of([outcome for outcome, _ in parts])
            _bring(outcome.buffers, order.loss)
            for remote in self._remotes:
                remote.confirm()
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
        self._doubt()

    def _doubt(self) -> None:
        """Send the workers everything anew: nobody knows what has reached them."""
        self._shared.doubt()
        for remote in self._remotes:
            remote.doubt()

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch, with the next pass."""
        self._forgotten.append((training, number))

    # -- optimizers -----------------------------------------------------------------------

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer whose parts are in the workers."""
        _packed("the optimizer's options", (kind, dict(options), settings_of(groups)))
        number, self._optimizers = self._optimizers, self._optimizers + 1
        used = [parts.number for parts in self._parts]
        jobs = []
        try:
            for remote, owned in zip(self._remotes, owners, strict=True):
                remote.share(owned)
                packed = remote.outbox.pack((kind, own_groups(groups, owned), dict(options)))
                jobs.append(MakePart(number, remote.packages(), packed, used))
            self._prepare(jobs)
        except BaseException as error:  # as above
            self._pool.close(f"{type(error).__name__} came as an optimizer was being divided")
            raise
        parts = _RemoteParts(number, owners, self._shared, self._run, self._ready)
        self._parts.add(parts)
        return parts

    def _ready(self) -> None:
        """Raise if the workers are gone, or would update memory that the model has left."""
        self._pool.check_open()
        self.check()

    def check(self) -> None:
        """Raise if the model has left the memory that it shares with the workers."""
        for worker in range(self._count):
            self._shared.check(worker)

    def save(self, save: SaveOrder) -> list[Part]:
        """Have every worker write its part of a checkpoint, and this process what is left."""
        save.check_remote(self._parts)
        jobs, rest, portion, count = _divided(save, self._shared)
        self._run(jobs, timeout=TIMEOUT)
        if rest is not None:
            save.job(rest, portion)()
        return save.parts(count - len(jobs))

    def status(self) -> Mapping[int, Activity]:
        """What every process is doing, as it has noted in shared memory."""
        return {member.number: self._pool.activity(member.place) for member in self.members}

    def all_alive(self) -> bool:
        """Whether no process has ended."""
        return self._pool.all_alive()

    def _run(
        self, jobs: Sequence[Job], whole: bool = False, timeout: float | None = None
    ) -> list[Any]:
        try:
            with self._starting():
                current = self._pool.start(jobs, timeout or self._timeout, whole)
            return self._pool.finish(current, timeout or self._timeout)
        except BaseException:
            self._doubt()
            raise

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """While open, no other thread closes.

        Raises:
            ClosedError: one does.
        """
        with self._lock:
            if self._closer not in (None, threading.get_ident()):
                raise closed("close() was called")
            self._starter = threading.get_ident()
            yield

    def close(self) -> None:
        """Dismiss the workers, and wait until they are gone."""
        me = threading.get_ident()
        with self._lock:
            self._closer = me
            is_used = self._pool.under_way and self._starter != me  # that thread hears of it
        with suppress(PenstockError):  # if they are gone already, so is what they remember
            for parts in () if is_used else self._parts:
                parts.keep()
        self._pool.close()


class _RemoteParts:
    """The parts of an optimizer that are in worker processes."""

    def __init__(
        self,
        number: int,
        owners: Sequence[Sequence[nn.Parameter]],
        shared: SharedModel,
        run: Callable[..., list[Any]],
        ready: Callable[[], None],
    ) -> None:
        self._ready = ready
        self.number = number
        self._owners = owners
        self._shared = shared
        self._run = run
        self._kept: State | None = None

    def keep(self) -> None:
        """Have here what the parts remember, as the workers are about to go."""
        kept: State = {}
        self.fetch(kept)
        self._kept = kept

    def step(self, groups: Groups, state: State) -> None:
        """Run the step of every part in its process, all at the same time."""
        settings, workers = settings_of(groups), range(len(self._owners))
        self._ready()
        warn_of_no_gradients(groups)
        try:
            self._run([Step(self.number, settings, self._shared.before(w)) for w in workers], True)
        finally:  # some may have, whatever happened
            for worker, owned in enumerate(self._owners):
                self._shared.stepped(worker, owned)

    def fetch(self, state: State) -> None:
        """Bring what the parts remember here."""
        if self._kept is not None:
            state.update(self._kept)
            return
        parts = self._run([FetchState(self.number)] * len(self._owners))
        state.clear()
        for worker, (owned, found) in enumerate(zip(self._owners, parts, strict=True)):
            numbers = {self._shared.number(worker, parameter): parameter for parameter in owned}
            state.update({numbers.get(key, key): value for key, value in found.items()})

    def load(self, state: State) -> None:
        """Let the parts remember what is in `state`."""
        jobs = []
        for worker, owned in enumerate(self._owners):
            own = {self._shared.number(worker, p): state[p] for p in owned if p in state}
            jobs.append(LoadState(self.number, own))  # type: ignore[arg-type]
        self._run(jobs)


def _divided(
    save: SaveOrder, shared: SharedModel
) -> tuple[list[WritePart], Part | None, Portion, int]:
    """What worker processes write, and what is left for their driver.

    Returns:
        the jobs; the driver's part, if it has one, its portion, and how many parts there are.
    """
    left = Portion()
    found: list[tuple[dict[str, int], dict[int, str]]] = []
    for worker, portion in enumerate(save.portions):
        known = {n: shared.number(worker, t) for n, t in portion.tensors.items()}
        own = {name: number for name, number in known.items() if number is not None}
        left.tensors |= {n: t for n, t in portion.tensors.items() if n not in own}
        for label, states in portion.states.items():
            left.states.setdefault(label, {}).update(states)
        found.append((own, shared.names(worker, save.names)))
    numbers = {label: p.number for label, p in save.remote.items() if p.number is not None}
    parts = save.parts(more=int(bool(left.tensors or any(left.states.values()))))
    jobs = [
        WritePart(part, own, parameters, numbers, save.background)
        for part, (own, parameters) in zip(parts, found, strict=False)
    ]
    rest = parts[len(found)] if len(parts) > len(found) else None
    return jobs, rest, left, len(parts)


def _packed(what: str, obj: Any) -> Packed:
    """What is to be sent to a worker.

    Raises:
        InputError: it cannot be.
    """
    try:
        return pack(obj)
    except Exception as error:
        raise InputError(
            f"{what} cannot be sent to a worker's process: {type(error).__name__}: {error}. "
            'Use workers="threads"'
        ) from error


@torch.no_grad()
def _bring(buffers: Sequence[torch.Tensor], loss: Loss | None) -> None:
    """Let a loss function have the buffers that its twin in a worker's process has now."""
    for mine, theirs in zip(loss.buffers if loss else (), buffers, strict=True):
        mine.copy_(theirs)


def _packed_news(remote: Remote) -> Packed | None:
    """The attributes of a worker's modules that have changed, if some have."""
    news = remote.news()
    if not news:
        return None
    kinds = [type(module).__name__ for module in remote.modules]
    names = [f"{kinds[k]}.{name}" for k, names in news.items() for name in names]
    return _packed(f"what was changed ({', '.join(names)})", news)


def _packed_loss(loss: Loss, backward: bool) -> Packed:
    """A loss, to be sent to the worker that has the last stage.

    Args:
        loss: with the batch's targets.
        backward: whether there are gradients at all.

    Raises:
        InputError: it cannot be sent; or it or a target has tensors that ask for a gradient, which
            would be left in a worker's process.
    """
    try:
        packed = pack(loss)
    except Exception:
        _packed("the loss function", (loss.function, loss.more))
        _packed("the target or the metrics function", (loss.targets, loss.metrics))
        raise
    if not backward:
        return packed
    if _ask_for_gradients(packed.tensors) and _ask_for_gradients(
        pack((loss.function, loss.more)).tensors
    ):
        raise InputError(
            "the loss function uses parameters, or other tensors that require a gradient, which "
            "would be left in a worker's process. Make it a part of the model, or use "
            'workers="threads"'
        )
    if _ask_for_gradients(flatten(loss.targets)[0]):
        raise InputError(
            "the target requires a gradient, which would be left in a worker's process; give "
            'target.detach(), or use workers="threads"'
        )
    return packed


def _ask_for_gradients(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
