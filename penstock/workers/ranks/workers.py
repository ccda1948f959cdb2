"""Workers that are the ranks of a torchrun launch: each runs its own stages, and none drives.

Every rank has a copy of the model, in which it uses the parameters of its own stages and leaves
the others alone, and calls the same methods of the pipeline.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.board.activity import EXCHANGING, Activity
from penstock.board.memory import Board, Reading, Record, moved, opened
from penstock.board.runs import new_board
from penstock.cadence import is_power_of_two
from penstock.capture.trees import map_leaves, without_history
from penstock.devices.kinds import kind_of
from penstock.devices.streams import on
from penstock.engine.batch import digest
from penstock.engine.batchnorm import move, replay
from penstock.engine.ends import to_device
from penstock.engine.orders import Order, Outcome, PassKind
from penstock.engine.residents import Residents
from penstock.engine.span import MicroBatch
from penstock.engine.state import Backups
from penstock.errors import InputError
from penstock.links.device_memory import ends_between, link_in_words
from penstock.links.link import Gradients
from penstock.links.local import LocalLink
from penstock.links.process_group import GroupEnd
from penstock.links.shared_memory import Giver, LinkSink, LinkSource, Receiver, Sender, Taker
from penstock.links.wire import Wire
from penstock.plan import Plan
from penstock.storage.part import Part, versions_of, with_versions
from penstock.workers.assembly import Assembly, own_casts
from penstock.workers.backend import Role, Workers
from penstock.workers.clipping import Clipping, norms_of, total_norm
from penstock.workers.gate import BusyError, busy, gate_of
from penstock.workers.members import Member
from penstock.workers.memories import check_buffers, check_memories, unchanged
from penstock.workers.optimizer_parts import (
    Groups,
    Parts,
    State,
    part_of,
    settings_of,
    step_part,
    warn_of_no_gradients,
)
from penstock.workers.ownership import Ownership, conflict
from penstock.workers.pool import Dispatch
from penstock.workers.ranks.process_groups import LinkGroups
from penstock.workers.ranks.rendezvous import Launch
from penstock.workers.ranks.ring import (
    ChainedSum,
    RankReplica,
    Ring,
    RingStage,
    share_weights,
    update_batchnorms,
    used_by_several,
)
from penstock.workers.ranks.sharing import crossing
from penstock.workers.ranks.stale import StaleCopy
from penstock.workers.ranks.thread import RankThread
from penstock.workers.saving import SaveOrder
from penstock.workers.ways import NewWay

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RankTicket:
    """A pass that was started.

    Attributes:
        workers: who run it.
        order: the pass.
        number: of the operation in which it began.
        dispatch: this rank's part of it.
    """

    workers: RankWorkers
    order: Order
    number: int
    dispatch: Dispatch

    def finish(self) -> Outcome:
        """Wait for it, see `Ticket`."""
        return self.workers.finish(self)


class RankWorkers(Workers):
    """The ranks of a launch, as seen by one of them.

    Args:
        launch: the ranks.
        plan: what they run.
        model: this rank's copy.
        order: the rank of every worker.
        threads: intra-op threads of each CPU worker.
        timeout: seconds that an operation may take.

    Attributes:
        residents: the values that stay with this rank between passes.
    """

    def __init__(
        self,
        launch: Launch,
        plan: Plan,
        model: nn.Module,
        order: Sequence[int],
        threads: int,
        timeout: float,
    ) -> None:
        self._launch = launch
        self._ranks = launch.ranks
        self._plan = plan
        self._me = order.index(launch.ranks.rank)
        self._order = order
        self._replica, self._place = divmod(self._me, plan.workers_per_replica)
        self._device = launch.device
        self._threads = threads
        self.devices = [launch.device] * len(order)
        self.members = [
            Member(
                worker,
                torch.device(entry.device),
                worker % plan.workers_per_replica,
                worker // plan.workers_per_replica,
                entry.pid,
                entry.host,
            )
            for worker, entry in enumerate(launch.entries[rank] for rank in order)
        ]
        here, placement = self._place, plan.placement
        self.homes = [launch.device if worker == here else None for worker in placement]
        self.ownership = Ownership(placement, plan.replicas)
        self.role = Role(
            index=self._me,
            leads=launch.ranks.rank == 0,
            has_inputs=placement[0] == here,
            routes=placement[0] == self._me,
            has_loss=placement[-1] == here,
            has_all_weights=False,
            name=launch.ranks.names[launch.ranks.rank],
        )
        self.board, self._record = self._noted()
        self._group_ends: list[GroupEnd] = []
        self._groups: LinkGroups | None = None
        self._wires: list[Wire] = []
        self._senders: list[Sender] = []
        self._peers: dict[int, torch.device] = {}  # at the other ends, if values stay on devices
        self._writer: Thread | None = None
        self._ends: dict[int, LinkSink | LinkSource | LocalLink] = {}
        self._deferred = False
        self._passes: Counter[PassKind] = Counter()
        self._several: dict[bool, list[nn.Parameter]] = {}
        self._thread = RankThread(launch.device, threads, self._reset, self._record)
        self._backups = Backups()
        pairs = _pairs(plan, order)
        on_devices = crossing(pairs, launch.entries, launch.ranks)
        with self._ranks.operation("the building of links"):
            self._ring = self._connect(pairs, on_devices)
        self._ranks.timeout = timeout
        self._ranks.workers = [order.index(rank) for rank in range(len(order))]
        paths = self.all_gather("the boards", str(self.board.path or ""))
        self._boards = {self._me: self.board, **self._opened(paths)}
        leader = launch.entries[order[0]]
        self.job = f"{leader.host} {leader.pid} {leader.started} {paths[0]}"
        self._ranks.doing = self._doing_of
        self._total = ChainedSum(self._ring, self._own_parameters) if self._ring else None
        first = self._me - self._place
        self._here = replica = RankReplica(self._replica, plan.weights, first, total=self._total)
        self.residents = Residents()
        self._gate = gate_of(model)
        residents = {self._place: self.residents}
        self._assemblies = {
            training: Assembly(
                plan, self.devices, self._ends, [self._place], replica, residents, self._gate
            )
            for training in (True, False)
        }
        self._model = model
        self._copy = StaleCopy(model, self._owned)

    def _noted(self) -> tuple[Board, Record]:
        """A board, and the record on it where this rank notes what it does."""
        board = new_board(1)
        return board, board.records[0]

    def _owned(self) -> list[torch.Tensor]:
        """The tensors of this rank's stages."""
        held = self.ownership
        return [*held.parameters[self._place], *held.buffers[self._place]]

    def _own_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return self.ownership.parameters[self._place]

    # -- links ----------------------------------------------------------------------------

    def _connect(
        self, pairs: Mapping[int, tuple[int, int]], on_devices: Collection[int]
    ) -> Ring | None:
        """Have this rank's ends of all connections.

        Args:
            pairs: the ranks at their ends, by number.
            on_devices: the numbers of those whose values stay on devices.

        Returns:
            the ring of its place, with replicas.
        """
        me, near = self._ranks.rank, self._launch.others.near
        mine = {k: pair for k, pair in pairs.items() if me in pair and pair[0] != pair[1]}
        others = {k: b if a == me else a for k, (a, b) in mine.items()}
        wires = self._launch.others.connect(others)
        self._launch.others.listener.close()  # nobody else is to come
        far = {k: pair for k, pair in pairs.items() if not near(*pair)}
        names = [torch.device(entry.device) for entry in self._launch.entries]
        groups = self._groups = LinkGroups(far, names, me)
        stages = len(self._plan.stages) - 1  # links between them
        first = self._replica * stages
        ways = {k: f"torch.distributed ({name})" for k, name in groups.backends.items()}
        for k, pair in pairs.items():
            one, other = (names[rank] for rank in pair)
            if k in on_devices:
                if me in pair:
                    self._peers[k] = other if pair[0] == me else one
                ways[k] = link_in_words(one, other)
            elif pair[0] == pair[1]:
                ways[k] = "by reference"
        self.links = tuple(ways.get(k, "shared memory") for k in range(stages))
        for k in range(stages):
            a, b = pairs[first + k]
            if a == b == me:
                self._ends[k] = LocalLink(self._device, self._device)
            elif first + k in mine:
                takes, gives = self._end(first + k, a == me, wires[first + k], groups)
                self._ends[k] = LinkSink(takes, gives) if a == me else LinkSource(gives, takes)
        count, each = self._plan.replicas, self._plan.workers_per_replica
        if count == 1:
            return None
        ring = count * stages + self._place
        there = ring + self._replica * each
        back = ring + (self._replica - 1) % count * each
        onward, _ = self._end(there, True, wires[there], groups)
        _, come = self._end(back, False, wires[back], groups)
        waits = self._device.type != "cpu" and not {there, back} <= {*on_devices}
        return Ring(self._replica, count, onward, come, waits)

    def _end(self, k: int, is_first: bool, wire: Wire, groups: LinkGroups) -> tuple[Taker, Giver]:
        """This rank's end of a connection: what takes values to the other end, and gives them.

        Args:
            k: its number.
            is_first: whether this rank is the first of the pair.
            wire: to the other end.
            groups: of connections between machines.
        """
        self._wires.append(wire)
        thread = self._thread

        def wait() -> None:
            thread.wait_for(wire)

        def wait_for_room() -> None:
            thread.wait_for_room(wire)

        if k in groups.peers:
            end = GroupEnd(wire, groups.peers[k], thread, self._device, wait, thread.left)
            self._group_ends.append(end)
            return end, end
        slots, arrivals = ends_between(self._device, self._peers.get(k))
        self._senders.append(Sender(wire, thread, wait_for_room, slots=slots))
        receiver = Receiver(wire, thread, arrivals, wait)
        thread.intake.add(receiver)
        return self._senders[-1], receiver

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model.

        Raises:
            InputError: on different ways, different ranks use a parameter; or forwards remember
                what other replicas do not see.
        """
        self.ownership.add(way)
        owners: dict[int, int] = {}
        for worker, tensors in enumerate(self.ownership.parameters):
            for tensor in tensors:
                if owners.setdefault(id(tensor), worker) != worker:
                    raise conflict(tensor, owners[id(tensor)], worker)
        if self._ring is not None:
            self._deferred = way.deferred
            spans = [span for stage in way.stages.values() for span in stage.spans]
            check_memories(spans, self._plan.replicas, self._model)
            check_buffers(spans, self._plan.replicas, self._model)
            for stage in self._assemblies[way.training].stages.values():
                stage.norms.replayed = not way.deferred
            way = replace(way, deferred=True)  # until the statistics of all replicas are there
        assembly = self._assemblies[way.training]
        assembly.add(way)
        if self._ring is not None:
            self._several[way.training] = used_by_several(assembly.stages.values())

    # -- requests to stop -----------------------------------------------------------------

    def request_stop(self) -> None:
        """This rank is asked to stop; the others hear of it when it next reports."""
        self._ranks.stops = True

    @property
    def is_stopping(self) -> bool:
        """Whether a rank was asked to stop, as far as all of them know by the last operation."""
        return bool(self._ranks.stopping)

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether this rank has got a request to stop, or another rank of its torchrun agent has.

        An agent sends such a request to all of its ranks.
        """
        entries = self._launch.entries
        asked = {entries[rank].group for rank in self._ranks.stopping}
        return self._ranks.stops or entries[self._ranks.rank].group in asked

    # -- passes ---------------------------------------------------------------------------

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients passes leave in this process: those of this rank's stages."""
        return self._own_parameters()

    def operation(self, what: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """An operation of all ranks: if it fails on one, it fails on all."""
        return self._ranks.operation(what, seconds)

    @property
    def operations(self) -> int:
        """How many operations of all ranks there were."""
        return self._ranks.number

    def broadcast(self, value: T | None, source: Literal["inputs", "leader"]) -> T:
        """What one rank has made, for all."""
        if source == "leader":
            return self._ranks.broadcast(value, 0, "the decision")
        return self._ranks.broadcast(value, self._order[self._plan.placement[0]], "the batch")

    def all_gather(self, what: str, value: T) -> list[T]:
        """What every rank has of something, in the order of workers."""
        with self._ranks.operation(what):
            found = self._ranks.end(value)
        return [found[rank] for rank in self._order]

    def start(self, order: Order) -> RankTicket:
        """Have this rank's thread run its part of a pass."""
        if order.training or order.what in ("train", "backward"):
            self._copy.trained()
        number = self._ranks.number
        self._passes[order.what] += 1
        is_checked, timeout = is_power_of_two(self._passes[order.what]), self._ranks.timeout
        started = self._thread.start([lambda: self._run(order, number, timeout, is_checked)])
        return RankTicket(self, order, number, started)

    def finish(self, ticket: RankTicket) -> Outcome:
        """Wait for this rank's part of a pass, and hear what has come of all."""
        try:
            with self.operation(ticket.order.name):
                own = self._own(ticket.dispatch)
                ahead = self._ranks.clock.ahead
                parts = self._ranks.end(self._for_others(own, ahead), self._only(ticket.order))
                if None not in parts:
                    _check_targets(parts)
                    self._check_weights(parts)
        except BaseException as error:
            self.give_up(error)
            raise
        self._backups.drop(ticket.number)
        return self._whole(own, parts, ahead)

    def _only(self, order: Order) -> int | None:
        """The rank that gets what has come of a pass on the others; `None` for all."""
        for_all = order.to_all or order.recorded
        return None if for_all else self._order[self._plan.placement[0]]

    def _for_others(self, own: Outcome, ahead: int) -> Outcome:
        """What other ranks get of a pass; with times of rank 0's clock, which is ahead by so much.

        Those with the first stage of another replica get the gradients of what entered, too.
        """
        gradients = own.gradients if self._ring is not None else {}
        return replace(own, gradients=gradients, logs=moved(own.logs, ahead))

    def _whole(self, own: Outcome, parts: Sequence[Outcome | None], ahead: int) -> Outcome:
        """What has come of a pass, from what every rank has found; with times of this clock."""
        whole = Outcome.of([_moved(part, self._device) for part in parts if part is not None])
        whole.logs = moved(whole.logs, -ahead)
        if self._ring is None:
            whole.gradients = own.gradients
        return whole

    def _own(self, current: Dispatch) -> Outcome:
        """What has come of this rank's part of a pass; meanwhile other ranks are listened to."""
        try:
            thread = self._thread
            self._ranks.wait_for(thread.wakeup, lambda: thread.is_done(current), self._doing)
            found: Outcome = self._thread.finish(current)[0]
        except BaseException as error:
            self._thread.give_up(error)  # before others hear of it, so that all have stopped then
            if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
                raise error.__cause__ from None  # a module that calls sys.exit() ends the rank
            raise
        return found

    @contextmanager
    def modules_idle(self) -> Iterator[None]:
        """While open, this rank's thread is amid no module."""
        timeout = self._ranks.timeout
        try:
            with self._gate.alone(timeout):
                yield
        except BusyError as error:
            self.give_up(error)
            raise busy(timeout) from error

    def give_up(self, why: BaseException) -> None:
        """Stop what is under way, and put back what passes have changed that did not end."""
        self._thread.give_up(why)
        self._backups.restore()
        for assembly in self._assemblies.values():
            assembly.clear()
        if self._total is not None:
            self._total.begin()

    def _run(self, order: Order, number: int, timeout: float, is_checked: bool) -> Outcome:
        """This rank's part of a pass, in its thread.

        Args:
            order: the pass.
            number: of the operation that it belongs to.
            timeout: seconds that it may wait for a neighbour.
            is_checked: whether replicas look whether they have the same weights.
        """
        with self._exchange(number, timeout):
            return self._run_part(order, number, is_checked)

    def _run_part(self, order: Order, number: int, is_checked: bool) -> Outcome:
        """See `_run`."""
        backward = order.what in ("train", "backward")
        self._backups.begin(number, [self.ownership.backup(self._place, backward)])
        brings = order.weights_since in (-1, number)  # tied weights, with the first of them
        like = order.what, order.training, order.modes
        kinds = [
            (*like, m.way, tuple(m.sizes.items()), brings and not k)
            for k, m in enumerate(self._mine(order))
        ]
        for end in self._group_ends:
            end.expect(kinds)
        part = order.part(self.role.has_inputs, self.role.has_loss)
        part = part.changed(wanted=self.ownership.own(self._place, order.wanted))
        assembly = self._assemblies[order.training]
        if self._ring is None or self._total is None:
            with own_casts():
                return assembly.run(self._place, part, self._record)
        self._total.begin(self._several[order.training])
        found = digest(self._owned()) if is_checked else None
        keeping = unchanged(part.loss, [*self._model.modules()]) if is_checked else nullcontext()
        with own_casts(), keeping:
            outcome = assembly.run(self._place, part, self._record)
        outcome.weights_before = found
        if part.loss is not None:
            outcome.targets = digest(list(part.loss.targets))
        with self._exchanging():
            if backward:
                self._total.finish()
            if order.what != "backward":
                stages = [s for s in assembly.stages.values() if isinstance(s, RingStage)]
                update_batchnorms(self._ring, stages, move if self._deferred else replay)
        return outcome

    def _mine(self, order: Order) -> Sequence[MicroBatch]:
        """The micro-batches of a pass that this rank's replica runs."""
        share, _ = self._here.part_of(order.replica, len(order.microbatches))
        return [order.microbatches[k] for k in share]

    def _check_weights(self, parts: Sequence[Outcome]) -> None:
        """Raise if replicas have begun this pass with different weights.

        Raises:
            InputError: they have.
        """
        each = self._plan.workers_per_replica
        for place in range(each):
            there = [parts[rank].weights_before for rank in self._order[place::each]]
            if len({found for found in there if found is not None}) > 1:
                self._passes.clear()  # look again next time
                raise InputError(
                    "the replicas have different weights or buffers: the model was not built or "
                    "changed in the same way on every rank (for instance with other random "
                    "seeds), or optimizer.step() has failed on some of them. Give all ranks the "
                    "same with load_state_dict or restore"
                )

    @property
    def recorded(self) -> Sequence[int]:
        """This rank's number alone: others are in other processes."""
        return [self._me]

    def status(self) -> Mapping[int, Reading]:
        """What the ranks of this machine are doing, or did last."""
        return {number: board.reading(0) for number, board in sorted(self._boards.items())}

    def _opened(self, paths: Sequence[str]) -> dict[int, Board]:
        """The boards of the other ranks of this machine, by their numbers as workers.

        Args:
            paths: of all workers' boards; empty where there is no file.
        """
        me, near = self._ranks.rank, self._launch.others.near
        found = {}
        for number, (rank, path) in enumerate(zip(self._order, paths, strict=True)):
            if path and rank != me and near(me, rank):
                with suppress(OSError, ValueError):
                    found[number] = opened(Path(path), 1)
        return found

    def _doing_of(self, rank: int) -> Activity:
        """What a rank is doing, or did last; nothing if it is on another machine."""
        board = self._boards.get(self._order.index(rank))
        return Activity.of(board.reading(0).code if board else 0)

    def stacks(self) -> Mapping[int, str]:
        """What this rank's thread is doing, with its stack."""
        return {self._me: self._thread.describe([0])[0]}

    def _doing(self) -> str:
        return str(Activity.of(self._record.code))

    def _reset(self) -> None:
        for end in self._ends.values():
            if isinstance(end, LocalLink):
                end.reset()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """With a worker's threads, and on its device."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with on(self._device):
                yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def stepping(self, owned: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around an optimizer's step: afterwards replicas have each other's new weights.

        Args:
            owned: the parameters that this rank updates.
        """
        if self._ring is None:
            with self.at_work():
                yield
            return
        try:
            with self.operation("optimizer.step"):
                with self.at_work():
                    yield
                number, timeout = self._ranks.number, self._ranks.timeout
                self._own(self._thread.start([lambda: self._share(owned, number, timeout)]))
        except BaseException:
            self._passes.clear()  # some may have new weights, so the next pass looks at them
            raise

    def _share(self, owned: Sequence[nn.Parameter], number: int, timeout: float) -> Outcome:
        """Send new weights to the other replicas, and have theirs; in the thread."""
        if self._ring is not None:
            with self._exchange(number, timeout), self._exchanging():
                share_weights(self._ring, self._own_parameters(), owned)
        return Outcome()

    @contextmanager
    def _exchange(self, number: int, timeout: float) -> Iterator[None]:
        """Around what the thread does: what follows comes after the copies of what it has sent.

        Args:
            number: of the operation that it belongs to.
            timeout: seconds that it may wait for a neighbour.
        """
        self._thread.begin(number, timeout)
        yield
        for sender in self._senders:
            sender.wait_for_copies()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Meanwhile, this rank's activity is an exchange with other replicas."""
        self._record.note(EXCHANGING)
        try:
            yield
        finally:
            self._record.note(0)

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch."""
        if training in self._assemblies:  # not after `close`
            self._assemblies[training].forget(number)

    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Values that stay with ranks, on all of them, which must ask for the same."""
        parts = self.all_gather("the fetching of states", self.residents.fetch(numbers))
        return {n: to_device(value, self._device) for part in parts for n, value in part.items()}

    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of values that stay with this rank."""
        self.residents.drop(numbers)
        for assembly in self._assemblies.values():
            assembly.let_go_of_weights()

    # -- parameters -----------------------------------------------------------------------

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
    ) -> Parts:
        """An optimizer of which this rank has the part for its own parameters."""
        return _RankPart(kind, groups, options, owners[self._me], self)

    def clip(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over the parameters of all ranks; the same bits."""
        held = self.ownership.parameters
        others = {id(p) for k, own in enumerate(held) if k != self._place for p in own}
        mine = {
            k: p for k, p in enumerate(parameters) if id(p) not in others and p.grad is not None
        }
        parts = self.all_gather("clip_grad_norm_", norms_of(mine, clipping))
        found = {k: norm for part in parts for k, norm in part.items()}
        total = total_norm([found[k] for k in sorted(found)], clipping, self._device)
        foreach = clipping.foreach
        nn.utils.clip_grads_with_norm_(mine.values(), clipping.max_norm, total, foreach)
        return total

    def state(self, model: nn.Module, of: nn.Module) -> dict[str, Any]:
        """The state dict of the model, or of a copy of it, on every rank.

        `of` is brought up to date with what the other ranks have of their own stages. What has no
        memory here, because it is on `meta`, is only in the state dict.
        """
        known = of.state_dict(keep_vars=True)
        state = with_versions({k: without_history(v) for k, v in known.items()}, versions_of(known))
        own = {id(t) for t in self._owned()} if self._replica == 0 else set()
        named = [*model.named_parameters(remove_duplicate=False)]
        named += [*model.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
        mine = {name: state[name] for name, t in named if id(t) in own and name in state}
        for worker, part in enumerate(self.all_gather("state_dict", mine)):
            for name, tensor in part.items() if worker != self._place else ():
                if state[name].is_meta:
                    state[name] = tensor
                else:
                    state[name].copy_(tensor)
        if of is model:
            self._copy.refreshed()
        return state

    def refresh(self, model: nn.Module) -> None:
        """Have the weights of all ranks in this rank's copy, if it may have older ones."""
        if any(self.all_gather("looking at weights", self._copy.is_old())):
            self.state(model, model)

    def all_alive(self) -> bool:
        """Whether this rank has not noticed that another one has ended."""
        return self._ranks.can_go_on

    def save(self, save: SaveOrder) -> list[Part]:
        """Write this rank's part of a checkpoint."""
        save.check_remote()
        if self._writer is not None:  # of a save that has failed elsewhere
            self._writer.join()
        parts = save.parts()
        self._writer = save.job(parts[self._me], save.portions[self._me])()
        return parts

    def close(self) -> None:
        """Finish the save under way, leave the other ranks, and close all connections."""
        with ExitStack() as stack:  # the last is called first, and all are called
            stack.callback(self.board.close)
            if self._groups is not None:
                stack.callback(self._groups.close)
            for wire in self._wires:
                stack.callback(wire.close)
            stack.callback(self._launch.others.listener.close)
            stack.callback(self._copy.close)
            stack.callback(self._let_go)
            stack.callback(self._thread.release)
            stack.callback(self._thread.close)
            stack.callback(self._ranks.close)
            if self._writer is not None:
                self._writer.join()

    def _let_go(self) -> None:
        """Let go of memory of this rank's device that others have, and of theirs."""
        if not self._peers:
            return
        self._ring = self._total = None
        self._here = replace(self._here, total=None)
        self._senders.clear()
        self._ends.clear()
        self._assemblies.clear()
        gc.collect()
        kind_of(self._device).release_shared()


class _RankPart:
    """The part of an optimizer that one rank has, which shares the optimizer's own state."""

    number = None
    updated: Collection[torch.Tensor] = ()

    def __init__(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owned: Sequence[nn.Parameter],
        workers: RankWorkers,
    ) -> None:
        self._part = part_of(kind, groups, options, owned)
        self._all = [parameter for group in groups for parameter in group["params"]]
        self._owned = list(owned)
        self._workers = workers

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Step on this rank's parameters; the other ranks do the same with theirs."""
        self._part.state = state  # type: ignore[assignment]
        warn_of_no_gradients(self._part.param_groups)
        with self._workers.stepping(self._owned):
            step_part(self._part, settings_of(groups))

    def fetch(self, state: State) -> None:
        """Bring what the others remember here."""
        numbers = {id(parameter): k for k, parameter in enumerate(self._all)}
        own = {id(parameter) for parameter in self._owned}
        mine = {
            numbers[id(p)]: values
            for p, values in state.items()
            if id(p) in own and id(p) in numbers  # it may have left the groups
        }
        parts = self._workers.all_gather("the optimizer's state_dict", mine)
        others = [p for k, p in enumerate(parts) if k != self._workers.role.index]
        for k, values in (item for part in others for item in part.items()):
            state[self._all[k]] = values

    def load(self, state: State) -> None:
        """It comes with the next step."""


def _pairs(plan: Plan, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The ranks at both ends of every connection, by its number.

    First those between stages, replica after replica; then those of the rings, from every worker
    of a replica to the one at its place in the next.

    Args:
        plan: what they run.
        order: the rank of every worker.
    """
    count, each = plan.replicas, plan.workers_per_replica
    between = [
        (order[r * each + a], order[r * each + b])
        for r in range(count)
        for a, b in pairwise(plan.placement)
    ]
    rings = [
        (order[worker], order[(worker + each) % len(order)])
        for worker in range(len(order) if count > 1 else 0)
    ]
    return dict(enumerate([*between, *rings]))


def _check_targets(parts: Sequence[Outcome]) -> None:
    """Raise if the ranks that compute losses were given different targets.

    Raises:
        InputError: they were.
    """
    if len({part.targets for part in parts if part.targets is not None}) > 1:
        raise InputError(
            "the ranks with the last stage of different replicas were given different targets; "
            "give every rank the target of the whole batch, the same on all: Penstock deals its "
            "micro-batches to the replicas"
        )


def _moved(outcome: Outcome, device: torch.device) -> Outcome:
    """With tensors on this device."""
    losses = {k: loss.to(device) for k, loss in outcome.losses.items()}
    results = {
        k: tuple(to_device(value, device) for value in values)
        for k, values in outcome.results.items()
    }
    metrics = map_leaves(lambda leaf: to_device(leaf, device), outcome.metrics)
    gradients: dict[int, Gradients] = {
        k: [to_device(value, device) for value in values] for k, values in outcome.gradients.items()
    }
    return replace(outcome, losses=losses, results=results, metrics=metrics, gradients=gradients)
