"""What a driver has its worker processes do. Each job is data, called with the `WorkerState`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from penstock.board.activity import STARTING, UPDATING
from penstock.board.memory import Board
from penstock.capture.calls import Sizes
from penstock.capture.randomness import Key
from penstock.devices.allocator import give_freed_memory_back
from penstock.devices.settings import TorchSettings
from penstock.engine.batchnorm import Statistics
from penstock.engine.ends import Loss
from penstock.engine.orders import Order, Outcome
from penstock.engine.replicas import InOrder, Replica
from penstock.engine.residents import States
from penstock.engine.span import MicroBatch
from penstock.engine.stage import Before
from penstock.links.device_memory import can_cross
from penstock.links.local import LocalLink
from penstock.links.pickling import Packed, unpack
from penstock.links.shared_memory import LinkSink, LinkSource
from penstock.links.weights import Weights
from penstock.plan import Plan
from penstock.workers.assembly import Assembly, own_casts
from penstock.workers.common_jobs import GivenValues, follow_script, leaving_no_trace
from penstock.workers.following import AttributeChanges
from penstock.workers.members import Member
from penstock.workers.memories import unchanged
from penstock.workers.optimizer_parts import step_part
from penstock.workers.process_state import freeze, loading
from penstock.workers.processes.shared_model import Crossing, Gradients, Package
from penstock.workers.processes.turns import Turnstile
from penstock.workers.processes.worker_state import WorkerState
from penstock.workers.tensors import Shared


class End(NamedTuple):
    """A worker's end of a link.

    Attributes:
        kind: what it is; a local one has both ends.
        grant: the number under which its socket was granted.
        peer: the device of the other end, as of `WorkerState.ends`.
    """

    kind: Literal["sink", "source", "local"]
    grant: int = 0
    peer: torch.device | None = None


def linked(
    grant: Callable[[int, int], int], one: int, other: int, devices: Sequence[torch.device]
) -> tuple[End, End]:
    """The ends of a new link of two workers, for the one that sends and the one that receives.

    Args:
        grant: gives a file to a worker, as `ProcessPool.grant`.
        one, other: the numbers of the workers.
        devices: theirs.
    """
    here, there = devices
    to, back = (there, here) if can_cross(here, there) else (None, None)
    sink, source = socket.socketpair()
    with sink, source:
        return (
            End("sink", grant(sink.fileno(), one), to),
            End("source", grant(source.fileno(), other), back),
        )


@dataclass(frozen=True)
class Enter:
    """Be a worker of another pool than before.

    Attributes:
        worker: its number there.
        workers: how many there are.
        board: the grant of the memory where they note what they do.
    """

    worker: int
    workers: int
    board: int

    def __call__(self, own: WorkerState) -> None:
        """Let go of everything that this process had in the pool before."""
        own.enter(self.worker, Board(self.workers, own.granted(self.board)).records[self.worker])
        gc.unfreeze()
        gc.collect()
        give_freed_memory_back()


@dataclass(frozen=True)
class Import:
    """Import modules ahead of time; those that fail are imported again when they are needed.

    Attributes:
        names: of the modules.
    """

    names: Sequence[str]

    def __call__(self, own: WorkerState) -> None:
        """Import what can be imported; errors come when a module is needed."""
        for name in self.names:
            with suppress(Exception), loading():
                import_module(name)


@dataclass(frozen=True)
class Common:
    """What a worker has in common with those at its place in other replicas.

    Attributes:
        wakeup: the grant of the pipe by which this worker is woken.
        wakeups: the grants of the pipes by which it wakes the others.
        turns: the grant and the size of the memory for turns.
    """

    wakeup: int
    wakeups: Sequence[int]
    turns: tuple[int, int]


@dataclass(frozen=True)
class Build:
    """Have the ends of links, and stages for both modes, as yet without any way.

    Attributes:
        plan: whose stages.
        member: who the worker is.
        ends: of links that this worker has, by the stage before them.
        common: with other replicas, if there are some.
    """

    doing: ClassVar[int] = STARTING

    plan: Plan
    member: Member
    ends: Mapping[int, End]
    common: Common | None

    def __call__(self, own: WorkerState) -> None:
        """Build them; whatever was here before is gone."""
        own.empty()
        own.work_on(self.member.device)
        own.place = self.member.place
        links: dict[int, LinkSink | LinkSource | LocalLink] = {}
        for k, (kind, grant, peer) in self.ends.items():
            if kind == "local":
                links[k] = LocalLink(own.device, own.device)
            else:
                weights = own.weights[k] = Weights()
                end = own.sink if kind == "sink" else own.source
                links[k] = end(grant, peer, weights)
        own.links = links
        count = self.plan.workers_per_replica
        if self.common:
            replica, of = self.member.replica, self.plan.replicas
            turnstile = own.have_turns(replica, of, self.common.wakeup, self.common.wakeups)
            turnstile.extend(own.segment(*self.common.turns).integers())
            in_order = self._in_order(own, turnstile)
            own.replica = Replica(replica, self.plan.weights, replica * count, in_order)
        for training in (True, False):
            devices = [own.device] * count
            residents = {own.place: own.residents}
            own.assemblies[training] = Assembly(
                self.plan, devices, links, [own.place], own.replica, residents
            )

    def _in_order(self, own: WorkerState, turnstile: Turnstile) -> dict[int, InOrder]:
        here = [index for index, place in enumerate(self.plan.placement) if place == own.place]
        return {index: InOrder(turnstile.make, own.adding) for index in here}


@dataclass(frozen=True)
class AddWay:
    """Let the stages know one more way through the model.

    Attributes:
        packages: tensors that it needs and the worker does not have.
        way: a `NewWay`, packed.
        modules: the user's modules that come with it, packed after it.
        turns: the grant and the size of memory for turns of these modules, with other replicas.
        crossing: weights on links to other workers, which messages name instead of copying.
    """

    doing: ClassVar[int] = STARTING

    packages: Sequence[Package]
    way: bytes
    modules: bytes
    turns: tuple[int, int] | None
    crossing: Crossing

    def __call__(self, own: WorkerState) -> None:
        """Map its tensors, unpack its modules, and add it to the assembly of its mode."""
        take(own, self.packages)
        for package in self.crossing.others:
            own.seen.update({shared.number: memory for shared, memory in mapped(own, package)})
        for stage, numbers in self.crossing.numbers.items():
            for number, mine in numbers.items():
                tensor = own.seen[number] if mine is None else own.tensors[mine]
                own.weights[stage].add(number, tensor)
        way, _ = own.unpack_way(self.way, self.modules)
        own.assemblies[way.training].add(way)
        if self.turns and own.turnstile:
            own.turnstile.extend(own.segment(*self.turns).integers())
        for index, common in own.replica.common.items():
            common.add(way.stages[index].spans, 0)
        freeze()


def take(own: WorkerState, packages: Sequence[Package]) -> None:
    """Map the tensors of some packages."""
    for package in packages:
        for shared, memory in mapped(own, package):
            own.tensors[shared.number] = shared.tensor(memory)
        own.slots.clear()
    own.note_memory()


def mapped(own: WorkerState, package: Package) -> Iterator[tuple[Shared, torch.Tensor]]:
    """The tensors of a package, each with its memory in this process."""
    if package.grant < 0:
        for shared in package.tensors:
            yield shared, shared.shared
        return
    segment = own.segment(package.grant, package.size)
    tensors = segment.tensors([shared.place for shared in package.tensors])
    yield from zip(package.tensors, tensors, strict=True)


@dataclass(frozen=True)
class RunPass:
    """Run this worker's part of a pass.

    Attributes:
        order: this worker's part of it, without the loss.
        loss: packed, if this worker has the last stage and there is one.
        gradients: what the worker has to know of them before the pass; `None` if there will be
            none.
        training: for every module whether it is in training mode, if that has changed.
        attributes: those of modules that have changed, packed; `None` if none have.
        forgotten: pairs `(training, number)` of batches for which no backward will come.
        settings: of torch, if they have ever changed since the workers were started.
        wanted: the numbers of the parameters whose gradients are computed; `None` for all.
        reports_memory: whether to report what forwards have left in modules.
        kind: the number by which a later `RunLike` refers to this pass; `None` if none may.
    """

    order: Order
    loss: Packed | None
    gradients: Gradients | None
    training: Sequence[bool] | None
    attributes: Packed | None
    forgotten: Sequence[tuple[bool, int]]
    settings: TorchSettings | None
    wanted: Sequence[int] | None = None
    reports_memory: bool = False
    kind: int | None = None

    def of(self, replica: Replica) -> RunPass:
        """The part of a replica that runs some of the micro-batches only."""
        if replica.of == 1:
            return self
        share, _ = replica.part_of(self.order.replica, len(self.order.microbatches))
        values = [v if k in share else () for k, v in enumerate(self.order.values)]
        gradients = {k: g for k, g in self.order.gradients.items() if k in share}
        return replace(self, order=self.order.changed(values=values, gradients=gradients))

    def __call__(self, own: WorkerState) -> Outcome:
        """Run it, and return the outcome; the gradients of parameters are in the slot."""
        with loading():
            loss: Loss | None = unpack(*self.loss, own.device_for) if self.loss else None
            attributes: AttributeChanges = (
                unpack(*self.attributes, own.device_for) if self.attributes else {}
            )
        for mode, number in self.forgotten:
            own.assemblies[mode].forget(number)
        follow_script(own, self.settings, self.training, attributes)
        if self.gradients is not None:
            own.begin(self.gradients)
        if self.kind is not None:
            own.kinds[self.kind] = self.order.changed(microbatches=(), values=())
        assembly = own.assemblies[self.order.training]
        order = self.order.changed(loss=loss, wanted=own.parameters(self.wanted))
        given = GivenValues(order)
        has_work = bool(own.replica.part_of(order.replica, len(order.microbatches))[0])
        keeping = unchanged(loss) if own.replica.of > 1 else nullcontext()
        try:
            is_kept = (order.trial or order.again) and has_work
            silent = order.trial
            trial = leaving_no_trace(own.modules, assembly, silent) if is_kept else nullcontext()
            with trial, own_casts(), _in_order(own), keeping:
                outcome = assembly.run(own.place, order, own.record)
                outcome.statistics = _statistics(own, order)
        except BaseException:
            assembly.clear()
            own.clear()
            raise
        outcome.written = given.written()
        if loss is not None and has_work:
            outcome.buffers = loss.buffers
        if order.what != "forward":  # its graph may still need what was replaced
            own.put_buffers_back()
            own.put_memory_back()
        if order.goes_back:
            own.end()
        if self.reports_memory:
            outcome.memory = own.memory.found()
        return outcome


@dataclass(frozen=True)
class RunLike:
    """Run a pass of one micro-batch that is like an earlier one, of a model that is unchanged.

    It takes fewer bytes than a `RunPass`, as such passes are short: one token of a text, say.

    Attributes:
        kind: the kind of the earlier pass, see `RunPass`.
        number: of the batch.
        sizes: of the micro-batch.
        key: of its random numbers: seed, step and number of the micro-batch.
        way: the number of the way that it takes.
        states: the fields of the micro-batch's `States`, if it has any.
        values: the values that enter the first stage; `None` if another worker has it.
        weights_since: the pass since which no weight has changed, see `Order`.
    """

    kind: int
    number: int
    sizes: Sizes
    key: tuple[int, int, int]
    way: int
    states: tuple[Any, ...] | None
    values: tuple[Any, ...] | None
    weights_since: int

    def __reduce__(self) -> Any:
        return RunLike, tuple(vars(self).values())

    def __call__(self, own: WorkerState) -> Outcome:
        """Run the pass, and return what has come of it."""
        states = None if self.states is None else States(*self.states)
        microbatch = MicroBatch(self.sizes, Key(*self.key), self.way, states)
        values = () if self.values is None else (self.values,)
        order = own.kinds[self.kind].changed(
            number=self.number,
            microbatches=(microbatch,),
            values=values,
            weights_since=self.weights_since,
        )
        return RunPass(order, None, None, None, None, (), None)(own)


@contextmanager
def _in_order(own: WorkerState) -> Iterator[None]:
    """Around a pass: modules that remember something wait for their turns among replicas."""
    every = own.replica.common.values()
    try:
        for common in every:
            common.watch()
        yield
    finally:
        for common in every:
            common.unwatch()


def _statistics(own: WorkerState, order: Order) -> dict[int, dict[int, list[Statistics]]]:
    """What BatchNorms have seen that are moved when all replicas have ended."""
    first = order.before.forwards
    numbers = range(first, first + len(order.microbatches) * (order.what != "backward"))
    taken = [common.norms.take(numbers) for common in own.replica.common.values()]
    found = {id(module): seen for of_stage in taken for module, seen in of_stage.items()}
    return {k: found[id(m)] for k, m in enumerate(own.modules) if id(m) in found} if found else {}


@dataclass(frozen=True)
class MakePart:
    """Have this worker's part of an optimizer.

    Attributes:
        number: of the optimizer.
        packages: tensors that it needs and the worker does not have.
        part: the optimizer's class, its groups for every replica, and options, packed.
        used: the numbers of earlier ones that somebody still has; others are let go.
    """

    number: int
    packages: Sequence[Package]
    part: bytes
    used: Sequence[int] = ()

    def __call__(self, own: WorkerState) -> None:
        """Make the part of the optimizer, and drop those that are no longer used."""
        take(own, self.packages)
        for parts in (own.optimizers, own.options, own.chunks):
            for number in [number for number in parts if number not in self.used]:
                del parts[number]
        with loading():
            kind, groups, options = own.inbox.unpack(self.part)
        own.optimizers[self.number] = kind(groups[own.replica.number], **options)
        own.options[self.number] = options


@dataclass(frozen=True)
class Step:
    """Update this worker's parameters.

    Attributes:
        number: of the optimizer.
        settings: of its groups.
        gradients: of the parameters.
        before: which micro-batches were given to replicas before.
    """

    doing: ClassVar[int] = UPDATING

    number: int
    settings: Sequence[Mapping[str, Any]]
    gradients: Gradients
    before: Before

    def __call__(self, own: WorkerState) -> None:
        """Step the part with the settings and the gradients of the driver."""
        part = own.optimizers[self.number]
        own.begin(self.gradients, updates=True)
        for common in own.replica.common.values():
            common.wait_for(self.before)  # forwards that were started before have these weights
        step_part(part, self.settings)
