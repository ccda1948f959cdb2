"""What the script has its actors do. Each job is data, called with the `ActorState`."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic_ns
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from penstock.board.process import started_at
from penstock.devices.cores import flushes_denormal
from penstock.devices.settings import TorchSettings
from penstock.engine.ends import Loss
from penstock.engine.orders import Order, Outcome
from penstock.links.handshake import Address, Listener, interface_of, this_machine
from penstock.links.local import Aborted
from penstock.links.pickling import Packed, unpack
from penstock.plan import Plan
from penstock.workers.clipping import Clipping, clip_values
from penstock.workers.common_jobs import GivenValues, follow_script, leaving_no_trace
from penstock.workers.optimizer_parts import own_groups, parameters_of, step_failed, step_part
from penstock.workers.pool import Job
from penstock.workers.process_state import freeze, loading
from penstock.workers.ranks.operations import GivenUp
from penstock.workers.ranks.rendezvous import LISTEN, Others, RankEntry, launched
from penstock.workers.ray.actor import ActorState, operation_of
from penstock.workers.ray.copies import Copy
from penstock.workers.ray.rank import ActorRank
from penstock.workers.tensors import Shared

_TIMEOUT = 120.0  # seconds in which all actors have to be there
_CPU = "cpu"
_INTERFACE = "GLOO_SOCKET_IFNAME"


# -- finding each other --------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """Be a worker of another pool than before.

    Attributes:
        worker: its number there.
    """

    worker: int

    def __call__(self, own: ActorState) -> None:
        """Let go of everything that the actor had in the pool before."""
        own.empty(self.worker)
        gc.unfreeze()
        gc.collect()


@dataclass(frozen=True)
class Introduce:
    """Say who the worker is; when that is answered, the process has imported what it needs.

    Attributes:
        path: where the script imports modules from; they are looked for there, too, but last.
    """

    path: Sequence[str]

    def __call__(self, own: ActorState) -> tuple[RankEntry, str, str]:
        """Give what all know of it, to which the script adds the secret; its node and its address.

        The node is what Ray calls it.
        """
        import ray

        sys.path += [entry for entry in self.path if entry not in sys.path]
        cores = len(os.sched_getaffinity(0))
        me = this_machine(), socket.gethostname(), os.getpid(), _CPU, cores
        node: str = ray.get_runtime_context().get_node_id()
        return RankEntry(*me, "", started_at()), node, ray.util.get_node_ip_address()


@dataclass(frozen=True)
class Listen:
    """Listen to other workers.

    Attributes:
        worker: the number that this one has from now on.
        host: the address of this worker's node; `None` if all are on one machine.
        has_store: whether to have the store that the process group is made with.
    """

    worker: int
    host: str | None
    has_store: bool = False

    def __call__(self, own: ActorState) -> tuple[Address, int]:
        """Give the address, and the port of the store, if there is one."""
        own.worker = self.worker
        listens = os.environ.get(LISTEN, self.host) if self.host else None
        own.listener = Listener(listens)
        address = own.listener.address._replace(host=self.host or "")
        if not self.has_store:
            return address, 0
        own.store = store_on(listens or "127.0.0.1")
        return address, own.store.port


def store_on(host: str) -> TCPStore:
    """A store on a free port of this address alone; by itself it would listen on all of them."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, (address, *_) = found[0]
    listening = socket.create_server((address, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # which is the store's own from now on
    )


@dataclass(frozen=True)
class Join:
    """Connect to the other workers, and be a rank that has stages, as yet without any way.

    Attributes:
        plan: whose stages.
        entries: of all workers.
        addresses: of all workers.
        port: of the store on the first one's node; 0 if all are on one machine.
        threads: intra-op threads.
        timeout: seconds that a pass may take.
        board: where the script's board is, if that is on its machine.
        machine: of the script.
        flushes_denormal: whether the script's thread takes denormal numbers for 0.
    """

    plan: Plan
    entries: Sequence[RankEntry]
    addresses: Sequence[Address]
    port: int
    threads: int
    timeout: float
    board: str
    machine: str
    flushes_denormal: bool = field(default_factory=flushes_denormal)

    def __call__(self, own: ActorState) -> None:
        """Run on all workers at the same time."""
        if own.listener is None:
            raise RuntimeError("the worker does not listen")
        master = [self.addresses[0].host, self.entries[0].host]
        if self.port:
            self._have_process_group(own)
        others = Others(own.worker, own.listener, self.entries, self.addresses, master)
        launch = launched(others)
        board = Path(self.board) if self.board and self.machine == this_machine() else None
        own.begin(ActorRank(launch, self.plan, own.model, self.threads, self.timeout, board))
        own.rank.in_thread(lambda: torch.set_flush_denormal(self.flushes_denormal))

    def _have_process_group(self, own: ActorState) -> None:
        """The default group of torch.distributed, for values between machines."""
        if _INTERFACE not in os.environ:
            name = interface_of(self.addresses[own.worker].host)
            if name:
                os.environ[_INTERFACE] = name
        host, timeout = self.addresses[0].host, timedelta(seconds=_TIMEOUT)
        store = own.store or TCPStore(host, self.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("penstock", store),
            rank=own.worker,
            world_size=len(self.entries),
            timeout=timeout,
        )


# -- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorChanges:
    """What the script has done to a worker's tensors since it last said so.

    Attributes:
        values: what tensors have now, by number.
        gradients: those that the script has given parameters; `None` where it has dropped one.
        zeroed: the numbers of parameters whose gradients it has set to zero.
        requires_grad: of parameters, where that has changed.
    """

    values: Mapping[int, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    zeroed: Sequence[int] = ()
    requires_grad: Mapping[int, bool] = field(default_factory=dict)

    @torch.no_grad()
    def apply(self, own: ActorState) -> None:
        """Apply it to the worker's tensors: first `requires_grad`, then values, then gradients."""
        for number, wanted in self.requires_grad.items():
            own.tensors[number].requires_grad_(wanted)
        for number, value in self.values.items():
            own.tensors[number].copy_(value)
        for number, gradient in self.gradients.items():
            own.tensors[number].grad = None if gradient is None else gradient.clone()
        for number in self.zeroed:
            if (present := own.tensors[number].grad) is not None:
                present.zero_()


@dataclass(frozen=True)
class Delivery:
    """Tensors of the model for a worker.

    Attributes:
        tensors: what they are like.
        values: of those that the worker gets, by number; others are on `meta`.
    """

    tensors: Sequence[Shared] = ()
    values: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def take(self, own: ActorState) -> None:
        """Have them; what was on `meta` until now stays the same object."""
        for shared in self.tensors:
            before = own.tensors.get(shared.number)
            value = self.values.get(shared.number)
            if value is None:
                if before is None:
                    own.tensors[shared.number] = shared.tensor(_empty(shared))
                continue
            found = shared.tensor(value.detach())
            if before is None:
                own.tensors[shared.number] = found
            elif before.is_meta:
                torch.utils.swap_tensors(before, found)


def _empty(shared: Shared) -> torch.Tensor:
    place = shared.place
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")


@dataclass(frozen=True)
class AddWay:
    """Let the stages know one more way through the model.

    Attributes:
        delivery: tensors that it needs and the worker does not have.
        way: a `NewWay`, packed; the same for all workers, as are the next two.
        modules: the user's modules that come with it, packed after it.
        paths: their names in the model.
    """

    delivery: Delivery
    way: bytes
    modules: bytes
    paths: Sequence[str]

    def __call__(self, own: ActorState) -> None:
        """Take its tensors, unpack its modules, and let the rank know it."""
        self.delivery.take(own)
        way, modules = own.unpack_way(self.way, self.modules)
        for path, module in zip(self.paths, modules, strict=True):
            own.model._modules.setdefault(path or "model", module)
        own.rank.add(way)
        freeze()


# -- passes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartPass:
    """Start this worker's part of a pass.

    Attributes:
        order: the pass, without the loss.
        loss: packed, if this worker has the last stage and there is one.
        changes: of its tensors.
        training: for every module whether it is in training mode, if that has changed.
        attributes: of modules, packed, if some have changed.
        forgotten: modes and numbers of batches that will not come back.
        contents: of buffers, by number, for a pass that others had begun.
        settings: of torch, if they have ever changed since the workers were started.
        wanted: the numbers of the parameters whose gradients are computed; `None` for all.
        before: the copy that is made before the pass, and sent while work goes on, if one is.
        copy: that is made after the pass, if one is.
    """

    operation: ClassVar[str] = "the start of a pass"

    order: Order
    loss: Packed | None
    changes: TensorChanges
    training: Sequence[bool] | None
    attributes: Packed | None
    forgotten: Sequence[tuple[bool, int]]
    contents: Mapping[int, torch.Tensor]
    settings: TorchSettings | None
    wanted: Sequence[int] | None = None
    before: Copy | None = None
    copy: Copy | None = None

    def __call__(self, own: ActorState) -> None:
        """Start it; the rest happens in the rank's thread, right before the pass and after it."""
        own.copies.check()
        with loading():
            loss: Loss | None = unpack(*self.loss) if self.loss else None
            attributes = unpack(*self.attributes) if self.attributes else {}
        for mode, number in self.forgotten:
            own.rank.forget(mode, number)
        order = self.order.changed(loss=loss, wanted=own.parameters(self.wanted))
        given = GivenValues(order)
        ticket = own.rank.start_within(self._around(own, attributes), order)
        own.tickets.append((order, ticket, self.copy, given))

    @contextmanager
    def _around(self, own: ActorState, attributes: Any) -> Iterator[None]:
        follow_script(own, self.settings, self.training, attributes)
        self.changes.apply(own)
        if self.before is not None:
            own.copies.make(own, self.before)
            own.copies.send_meanwhile(self.before)
        order, assembly = self.order, own.rank.assembly(self.order.training)
        is_kept = order.trial or order.again
        with leaving_no_trace(own.modules, assembly, order.trial) if is_kept else nullcontext():
            for number, content in self.contents.items():
                own.tensors[number].data.copy_(content)
            yield
        if self.copy is not None:
            own.copies.make(own, self.copy)


class Done(NamedTuple):
    """What has come of a worker's part of a pass.

    Attributes:
        outcome: of this part alone.
        present: the numbers of parameters that have a gradient now; `None` if that is as before.
        replaced: the numbers of buffers in whose places forwards have put others.
        now: by this worker's clock.
    """

    outcome: Outcome
    present: Sequence[int] | None
    replaced: Sequence[int]
    now: int


@dataclass(frozen=True)
class FinishPass:
    """Wait for this worker's part of a pass that is under way.

    Attributes:
        number: of the pass.
        operation: what a user calls it.
    """

    number: int
    operation: str

    def __call__(self, own: ActorState) -> Done:
        """Give what has come of it, when the buddy has the copy after it, if there is one."""
        places = [k for k, (order, *_) in enumerate(own.tickets) if order.number == self.number]
        if not places:
            raise GivenUp
        order, ticket, copy, given = own.tickets[places[0]]
        del own.tickets[places[0]]
        outcome = ticket.finish()
        outcome.written = given.written()
        if order.loss is not None:
            outcome.buffers = order.loss.buffers
        replaced = []
        if order.what != "forward":  # whose graph may still need what there was before
            replaced = own.put_buffers_back()
        present = None
        if order.goes_back:
            present = [n for n, p in own.own_parameters().items() if p.grad is not None]
        done = Done(outcome, present, replaced, monotonic_ns())
        if copy is not None:
            own.copies.send(copy, own.is_given_up)
        return done


@dataclass(frozen=True)
class DropPasses:
    """Give up the passes that are under way, and undo them."""

    operation: ClassVar[str] = "giving up"

    def __call__(self, own: ActorState) -> None:
        """Run on all workers at the same time."""
        own.tickets.clear()
        own.rank.give_up(Aborted())


# -- parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MakePart:
    """Have this worker's part of an optimizer.

    Attributes:
        number: of the optimizer.
        delivery: tensors that it needs and the worker does not have.
        part: the optimizer's class, its groups, and options, packed; the same for all workers.
        owned: the numbers of the parameters that this worker updates.
        used: the numbers of earlier optimizers that somebody still has; others are let go.
    """

    number: int
    delivery: Delivery
    part: bytes
    owned: Sequence[int]
    used: Sequence[int] = ()

    def __call__(self, own: ActorState) -> None:
        """Make the part of the optimizer, and drop those that are no longer used."""
        self.delivery.take(own)
        own.optimizers = {k: part for k, part in own.optimizers.items() if k in self.used}
        with loading():
            kind, groups, options = own.inbox.unpack(self.part)
        groups = own_groups(groups, [own.tensors[number] for number in self.owned])
        own.optimizers[self.number] = kind(groups, **options)


@dataclass(frozen=True)
class Step:
    """Update this worker's parameters.

    Attributes:
        number: of the optimizer.
        settings: of its groups.
        changes: of its tensors.
    """

    operation: ClassVar[str] = "optimizer.step"

    number: int
    settings: Sequence[Mapping[str, Any]]
    changes: TensorChanges

    def __call__(self, own: ActorState) -> None:
        """Step the part with the settings that the script has now."""
        part = own.optimizers[self.number]
        owned = parameters_of(part)
        own.rank.update(lambda: self._step(own, part), owned)

    def _step(self, own: ActorState, part: Optimizer) -> None:
        try:
            self.changes.apply(own)
            step_part(part, self.settings)
        except BaseException as error:
            raise step_failed(error, own.worker) from error


def _apply(own: ActorState, changes: TensorChanges) -> None:
    """Apply changes in the rank's thread, so after all passes that were started before."""
    own.rank.in_thread(lambda: changes.apply(own))


@dataclass(frozen=True)
class Clip:
    """Scale gradients down, see `Workers.clip`.

    Attributes:
        parameters: the numbers of all that are clipped, on all workers.
        clipping: how.
        changes: of this worker's tensors.
    """

    operation: ClassVar[str] = "clip_grad_norm_"

    parameters: Sequence[int]
    clipping: Clipping
    changes: TensorChanges

    def __call__(self, own: ActorState) -> torch.Tensor:
        """Return the norm of all gradients before clipping, the same on every worker."""
        _apply(own, self.changes)
        return own.rank.clip([own.tensors[number] for number in self.parameters], self.clipping)


@dataclass(frozen=True)
class ClipValue:
    """Clamp gradients, see `Workers.clip_value`.

    Attributes:
        parameters: the numbers of all that are clipped, on all workers.
        clip_value, foreach: as of `torch.nn.utils.clip_grad_value_`.
        changes: of this worker's tensors.
    """

    parameters: Sequence[int]
    clip_value: float
    foreach: bool | None
    changes: TensorChanges

    def __call__(self, own: ActorState) -> None:
        """Clamp the gradients of the worker's own parameters, in place."""
        _apply(own, self.changes)
        here = [own.tensors[number] for number in self.parameters]
        clip_values(here, self.clip_value, self.foreach)


@dataclass(frozen=True)
class Unscale:
    """Divide gradients by the scale of a loss scaler.

    Attributes:
        parameters: the numbers of all, on all workers.
        inverse: 1 over the scale.
        allows_half: whether gradients may be in float16.
        changes: of this worker's tensors.
    """

    parameters: Sequence[int]
    inverse: torch.Tensor
    allows_half: bool
    changes: TensorChanges

    def __call__(self, own: ActorState) -> list[torch.Tensor]:
        """Give for every device a number above 0 if a gradient is not finite."""
        _apply(own, self.changes)
        here = [own.tensors[number] for number in self.parameters]
        with_gradients = [p for p in here if p.grad is not None]
        if not with_gradients:
            return []
        plain = torch.optim.SGD(with_gradients)
        found = torch.zeros(())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        per_device = scaler._unscale_grads_(plain, self.inverse, found, self.allows_half)
        return list(per_device.values())


@dataclass(frozen=True)
class Fetch:
    """What tensors hold, and their gradients.

    Attributes:
        tensors: the numbers of those whose values are wanted.
        gradients: the numbers of those whose gradients are.
        changes: of this worker's tensors.
    """

    tensors: Sequence[int]
    gradients: Sequence[int]
    changes: TensorChanges

    def __call__(
        self, own: ActorState
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor | None]]:
        """Return values and gradients (or `None`), by number, after the passes under way."""
        _apply(own, self.changes)
        replaced = own.replaced()
        values = {n: replaced.get(n, own.tensors[n]).detach() for n in self.tensors}
        gradients = {number: own.tensors[number].grad for number in self.gradients}
        return values, gradients


@dataclass(frozen=True)
class Update:
    """Let a worker have the changes of its tensors, and do nothing else."""

    changes: TensorChanges

    def __call__(self, own: ActorState) -> None:
        """Apply the changes, after the passes that are under way."""
        _apply(own, self.changes)


@dataclass(frozen=True)
class Copied:
    """Do a job, and have the buddy take a copy of what the worker has since.

    Attributes:
        job: what is done.
        copy: the copy.
    """

    job: Job
    copy: Copy

    @property
    def operation(self) -> str:
        """The job's, which ends before the copy is sent."""
        return operation_of(self.job)

    def __call__(self, own: ActorState) -> Any:
        """Return the job's result once the buddy has the copy."""
        found = self.job(own)
        own.rank.in_thread(lambda: own.copies.make(own, self.copy))
        own.copies.send(self.copy, own.is_given_up)
        return found


@dataclass(frozen=True)
class Leave:
    """End the rank; the process is ended by the script."""

    def __call__(self, own: ActorState) -> None:
        """Close all connections to other workers."""
        own.rank.close()
