"""What a worker process has: its stages, its tensors, its ends of the links."""

from __future__ import annotations

import gc
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.board.activity import Activity
from penstock.board.memory import Record
from penstock.devices.kinds import kind_of
from penstock.devices.streams import on
from penstock.engine.orders import Order
from penstock.engine.replicas import ONLY
from penstock.engine.residents import Residents
from penstock.engine.sums import Adding
from penstock.errors import InputError, PenstockError, WorkerError
from penstock.links.device_memory import ends_between
from penstock.links.intake import Intake
from penstock.links.local import Aborted, LocalLink
from penstock.links.pickling import DeviceFor, pack, portable, unpack
from penstock.links.segment import Segment
from penstock.links.shared_memory import Borrower, Lender, LinkSink, LinkSource, Receiver, Sender
from penstock.links.slots import Arrivals
from penstock.links.weights import Weights
from penstock.links.wire import SPIN, Gone, Wire
from penstock.torch_internals import foreach_copy_
from penstock.workers.assembly import Assembly
from penstock.workers.process_state import ProcessState, loading, unsent
from penstock.workers.processes.messages import Give, GiveUp, Grant, Report
from penstock.workers.processes.shared_model import CHANGED, Gradients
from penstock.workers.processes.turns import Turnstile, Wakeups

CPU = torch.device("cpu")


class Slot(NamedTuple):
    """Memory for the gradients of all parameters.

    Attributes:
        gradients: by the index of the parameter among all parameters.
        homes: other tensors in the same memory, which users do not see.
        present: for each of them a byte: 0 if it is unused memory, 1 if it is the gradient that the
            parameter had before the pass, and `CHANGED` if the pass has written to it.
    """

    gradients: list[torch.Tensor]
    homes: Sequence[torch.Tensor]
    present: bytearray | memoryview

    @classmethod
    def of(cls, gradients: Sequence[torch.Tensor], present: bytearray | memoryview) -> Slot:
        """The slot with these gradients in it."""
        return cls(list(gradients), [gradient.detach() for gradient in gradients], present)


NO_SLOT = Slot([], (), bytearray())


class WorkerState(ProcessState):
    """The process of one worker, from the inside. Jobs are called with it.

    Args:
        worker: its number.
        wire: to the driver.
        record: where it notes what it does.

    Attributes:
        worker: its number.
        device: where its stages are.
        place: which of its replica's workers it is.
        replica: the replica whose stages it runs.
        turnstile: makes turns, if there are several replicas.
        record: where it notes what it does.
        assemblies: its stages, by mode.
        residents: the values that its stages keep between passes.
        kinds: by number, the kinds of orders to which a `RunLike` may refer.
        weights: for each link, by the stage before it, the weights that cross it.
        seen: tensors of other workers that this process maps, by their common numbers.
        links: its end of each link, by the stage before it.
        slots: memory for the gradients of all parameters, by number.
        options: the arguments of each optimizer's class, by the optimizer's number.
        chunks: the parts of those optimizers that are updated chunk by chunk, by number.
        leaves: whether this process is to end (SIGTERM); every report says so.
    """

    def __init__(self, worker: int, wire: Wire, record: Record) -> None:
        self.worker = worker
        self.record = record
        self.patience = SPIN
        self.leaves = False
        self.dispatch, self._given_up = 0, -1
        self._wire = wire
        self._borrower = Borrower(Arrivals(CPU))
        self._lender = Lender(wire)
        self._jobs: deque[tuple[int, Callable[[WorkerState], Any]]] = deque()
        self._grants: dict[int, int] = {}
        self._intake = Intake()
        self._wakeups: Wakeups | None = None
        self._current = ExitStack()  # the device that is this thread's current one
        self.empty()

    def empty(self) -> None:
        """Have nothing, as at the beginning."""
        self.work_on(CPU)
        self.place = 0
        self.replica = ONLY
        self.turnstile: Turnstile | None = None
        if self._wakeups:
            self._wakeups.close()
        self._wakeups = None
        self.assemblies: dict[bool, Assembly] = {}
        self.residents = Residents()
        self.kinds: dict[int, Order] = {}
        self.weights: dict[int, Weights] = {}
        self.seen: dict[int, torch.Tensor] = {}
        self.links: dict[int, LinkSink | LinkSource | LocalLink] = {}
        self.slots: dict[int, Slot] = {}
        self.options: dict[int, Mapping[str, Any]] = {}
        self.chunks: dict[int, Any] = {}
        self._have_nothing()
        self._slot = -1
        self._versions: dict[int, int] = {}  # of gradients that a pass may add to, before it
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._memory: dict[int, torch.Tensor] = {}
        self._places = _places_of(())
        self._counted, self._found = 0, list[nn.Parameter]()
        self._numbers: dict[int, int] = {}  # of these parameters, by id

    def enter(self, worker: int, record: Record) -> None:
        """Be another worker, with nothing of what this one had.

        Args:
            worker: its number.
            record: where it notes what it does.
        """
        self.empty()
        for fd in self._grants.values():
            os.close(fd)
        self._grants.clear()
        self.worker, self.record = worker, record

    def leave(self) -> None:
        """Release device memory before the process ends: other processes count its references."""
        if self.device.type != "cpu":  # whose memory is counted, as other processes have it, too
            self.empty()
            gc.unfreeze()
            gc.collect()

    def work_on(self, device: torch.device) -> None:
        """Have stages, and ends of links, on this device from now on."""
        self.device = device
        self._current.close()
        self._current.enter_context(on(device))

    def serve(self) -> None:
        """Do the next job that the driver gives, and report; waits for it.

        Raises:
            Gone: the driver closed the socket.
        """
        while not self._jobs:
            self._read_message()
        self.dispatch, job = self._jobs.popleft()
        if self.dispatch <= self._given_up:
            job = _give_up
        doing = getattr(job, "doing", 0)
        self.record.note(doing)
        failed, value = False, None
        try:
            value = job(self)
            self._wait_for_device()
        except BaseException as error:
            failed, value = True, portable(_named(error, self.worker, doing))
            with suppress(RuntimeError):  # if the device has failed, that is the error
                self._wait_for_device()
        del job
        self.record.note(0)
        try:
            self._report(failed, value)
        except Gone:
            raise
        except Exception as error:  # what cannot be pickled has not been sent in part
            self._report(True, portable(unsent(error, self.worker)))

    def _read_message(self) -> None:
        """Read one message of the driver."""
        data, fd = self._wire.receive()
        message: Give | GiveUp | Grant = pickle.loads(data)
        if isinstance(message, Give):
            tensors = self._borrower.borrow(message.tensors, fd)
            self._jobs.append((message.dispatch, _unpacked(message.job, tensors, self.device_for)))
        elif isinstance(message, GiveUp):
            self._given_up = message.dispatch
        else:
            self._grants[message.number] = fd

    def device_for(self, device: torch.device) -> torch.device:
        """The device for a tensor in a message that was on some device other than the CPU."""
        return self.device

    def _wait_for_device(self) -> None:
        """Wait until the device has computed what the driver will see."""
        if kind_of(self.device).has_streams:
            kind_of(self.device).synchronize(self.device)

    def _report(self, failed: bool, value: Any) -> None:
        """Send the driver what has come of the job."""
        data, tensors = pack(value)
        with self._lender.lend(tensors) as loan:
            report = Report(self.dispatch, failed, data, loan.lent, self.leaves)
            self._wire.send(pickle.dumps(report), loan.fd)

    def granted(self, number: int) -> int:
        """The file descriptor that the driver sent under this number, to be used once."""
        return self._grants.pop(number)

    def segment(self, number: int, size: int) -> Segment:
        """The memory whose file descriptor the driver sent under this number."""
        return Segment(size, self.granted(number))

    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Those of these values that are kept here between passes, by number."""
        return self.residents.fetch(numbers)

    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of these values, and of weights of other stages that a generation has brought."""
        self.residents.drop(numbers)
        for assembly in self.assemblies.values():
            assembly.let_go_of_weights()

    # -- gradients ------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        if len(self.tensors) != self._counted:
            self._counted = len(self.tensors)
            self._found = [t for t in self.tensors.values() if isinstance(t, nn.Parameter)]
            self._numbers = {id(parameter): k for k, parameter in enumerate(self._found)}
        return self._found

    def begin(self, gradients: Gradients, updates: bool = False) -> None:
        """Have the gradients that the driver has.

        Where several replicas add to them, parameters have them only meanwhile; see `adding`.

        Args:
            gradients: where they are.
            updates: whether an optimizer uses them.
        """
        self._slot = gradients.slot
        if gradients.new_slot is not None:
            grant, size, places, shared = gradients.new_slot
            tensors = self.segment(grant, size).tensors(places)
            if shared:
                self.slots.clear()  # others are not used again
                tensors = [*shared, *tensors]
            *slots, present = tensors
            self.slots[self._slot] = Slot.of(slots, present.numpy().data)
        parameters, slot = self._parameters(), self.slots.get(self._slot, NO_SLOT)
        if gradients.requires_grad is not None:
            for parameter, wanted in zip(parameters, gradients.requires_grad, strict=True):
                parameter.requires_grad_(wanted)
        # So autograd raises if a graph needs the values that such a tensor had before.
        torch.autograd.graph.increment_version([self.tensors[k] for k in gradients.written])
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        torch.autograd.graph.increment_version([self.seen[k] for k in gradients.crossing])
        for k in gradients.present if self.replica.of == 1 or updates else ():
            parameters[k].grad = slot.gradients[k]
        had = gradients.present if self.replica.of == 1 and not updates else ()
        self._versions = {k: slot.gradients[k]._version for k in had}

    def end(self) -> None:
        """Put the gradients where the driver sees them, and note there which parameters have one.

        Raises:
            InputError: one is sparse; or something other than the sum of replicas has added to one.
        """
        if self.replica.of == 1:
            self._put(enumerate(self._parameters()))
        else:
            self._check_apart(self._parameters())

    def lend(self, parameters: Sequence[nn.Parameter]) -> Adding:
        """Have just these parameters, with a slot for their gradients; returns `adding`."""
        self.tensors, self._memory = dict(enumerate(parameters)), {}
        self.note_memory()
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        self.slots[self._slot] = Slot.of(gradients, bytearray(len(gradients)))
        return self.adding

    @contextmanager
    def adding(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """While open, `.grad` of these leaves is the sum of all replicas so far; else it is `None`.

        Raises:
            InputError: something has added to a leaf's gradient outside of this.
        """
        slot = self.slots.get(self._slot, NO_SLOT)
        self._parameters()
        numbered = [(self._numbers[id(leaf)], leaf) for leaf in leaves if id(leaf) in self._numbers]
        self._check_apart([leaf for _, leaf in numbered])
        for k, leaf in numbered:
            leaf.grad = slot.gradients[k] if slot.present[k] else None
        self._versions = {k: slot.gradients[k]._version for k, _ in numbered if slot.present[k]}
        yield
        self._put(numbered)
        for _, leaf in numbered:
            leaf.grad = None

    @staticmethod
    def _check_apart(leaves: Iterable[torch.Tensor]) -> None:
        """Raise if anything other than the sum of replicas has added to the gradient of one."""
        if any(leaf.grad is not None for leaf in leaves):
            raise InputError(
                "the backward of an autograd Function adds to .grad itself "
                "(torch.autograd.backward within it), which replicas cannot add up in order; use "
                "replicas=1"
            )

    def _put(self, numbered: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Put the gradients of some parameters into the slot, where they are not there yet.

        A hook may have dropped one. The slot says which have changed.

        Raises:
            InputError: one is sparse.
        """
        gradients, homes, present = self.slots.get(self._slot, NO_SLOT)
        new, found = [], []
        for k, parameter in numbered:
            gradient = parameter.grad
            if gradient is None:
                present[k] = 0
            elif gradient is not gradients[k]:
                new.append((k, parameter))
                found.append(gradient)
            elif gradient.data_ptr() != homes[k].data_ptr():  # a hook has given it other memory
                gradients[k] = homes[k].detach()
                new.append((k, parameter))
                found.append(gradient)
            elif gradient._version != self._versions.get(k):
                present[k] = CHANGED
        for (_, parameter), gradient in zip(new, found, strict=True):
            if gradient.layout is not torch.strided:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, "
                    'which only workers="threads" can have; use sparse=False'
                )
        if new:
            foreach_copy_([gradients[k] for k, _ in new], found)
        for k, parameter in new:
            parameter.grad = gradients[k]
            present[k] = CHANGED

    def clear(self) -> None:
        """Let go of what a pass has left that failed; the driver puts gradients back."""
        for parameter in self._parameters():
            parameter.grad = None
        for tensor, memory in self._moved():
            tensor.data = memory
        for link in self.links.values():
            if isinstance(link, LocalLink):
                link.reset()

    # -- what forwards replace ------------------------------------------------------------

    def note_memory(self) -> None:
        """Note where the tensors lie that the driver shares."""
        for number in self.tensors.keys() - self._memory.keys():
            self._memory[number] = self.tensors[number].data
        self._places = _places_of([self._memory[number] for number in self.tensors])

    def put_memory_back(self) -> None:
        """Copy tensors to which a forward gave other memory (`.data`, `set_`) back to their own.

        Their own is the memory that the driver sees.

        Raises:
            InputError: one has another shape or dtype now; or other replicas needed it meanwhile.
        """
        for tensor, memory in self._moved():
            self._check_replaced("the data of a tensor", memory, tensor)
            memory.copy_(tensor.data)
            tensor.data = memory

    def _moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that were given other memory, each with the memory that it had."""
        now = _places_of(self.tensors.values())
        if now == self._places:
            return []
        found = [(tensor, self._memory[number]) for number, tensor in self.tensors.items()]
        places = zip(found, now, self._places, strict=True)
        return [pair for pair, here, there in places if here != there]

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Note where these modules have buffers that the driver shares."""
        shared = {id(tensor) for tensor in self.tensors.values()}
        self._buffers += [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in shared
        ]

    def put_buffers_back(self) -> None:
        """Copy buffers that a forward has replaced into those that the driver sees.

        Raises:
            InputError: one has another shape or dtype now; or other replicas needed it meanwhile.
        """
        for registry, name, shared in self._buffers:
            found = registry[name]
            if found is shared or found is None:
                continue
            self._check_replaced(f"the buffer {name!r}", shared, found)
            with torch.no_grad():
                shared.copy_(found)
            registry[name] = shared

    def _check_replaced(self, what: str, shared: torch.Tensor, found: torch.Tensor) -> None:
        """Raise unless what a forward has put in a tensor's place can be copied into that tensor.

        Raises:
            InputError: it has another shape or dtype; or other replicas needed it meanwhile.
        """
        replaced = f"a forward has replaced {what} of shape {tuple(shared.shape)}"
        if found.shape != shared.shape or found.dtype != shared.dtype:
            raise InputError(
                f"{replaced} by one of shape {tuple(found.shape)}, {found.dtype}, which the "
                'driver\'s process cannot see; use workers="threads"'
            )
        if self.replica.of > 1:
            raise InputError(
                f"{replaced}, which replicas in other processes do not see; change it in place "
                '(copy_), or use workers="threads"'
            )

    # -- replicas -------------------------------------------------------------------------

    def have_turns(self, replica: int, of: int, own: int, others: Sequence[int]) -> Turnstile:
        """Make what gives this worker its turns among the replicas.

        Args:
            replica: the number of this worker's replica.
            of: how many replicas there are.
            own: the grant of the pipe by which this worker is woken.
            others: the grants of the pipes by which it wakes the others.
        """
        wakeups = Wakeups(self.granted(own), [self.granted(number) for number in others])

        def sleep() -> None:
            with self.record.waiting():
                self._wait(wakeups.own)

        self.turnstile, self._wakeups = Turnstile(replica, of, wakeups, sleep), wakeups
        return self.turnstile

    # -- links ----------------------------------------------------------------------------

    def sink(
        self, grant: int, peer: torch.device | None = None, weights: Weights | None = None
    ) -> LinkSink:
        """The earlier stage's end of a link.

        Args:
            grant: the number under which its socket was granted.
            peer: as of `ends`.
            weights: that cross it.
        """
        sender, receiver = self.ends(self._granted_wire(grant), peer, out=weights)
        return LinkSink(sender, receiver)

    def source(
        self, grant: int, peer: torch.device | None = None, weights: Weights | None = None
    ) -> LinkSource:
        """The later stage's end of a link.

        Args:
            grant: the number under which its socket was granted.
            peer: as of `ends`.
            weights: that cross it.
        """
        sender, receiver = self.ends(self._granted_wire(grant), peer, come=weights)
        return LinkSource(receiver, sender)

    def _granted_wire(self, grant: int) -> Wire:
        return Wire(socket.socket(fileno=self.granted(grant)))

    def ends(
        self,
        wire: Wire,
        peer: torch.device | None = None,
        out: Weights | None = None,
        come: Weights | None = None,
    ) -> tuple[Sender, Receiver]:
        """A sender and a receiver for a wire to another worker; the driver can interrupt both.

        Args:
            wire: to the other worker.
            peer: its device, if values cross in the memory of devices; else they go by the CPU's.
            out: weights that are sent by name. Gradients never are: they are added to.
            come: weights that come by name.
        """

        def wait_for_values() -> None:
            if not wire.ready():
                self._wait(wire.fileno())

        def wait_for_room() -> None:
            if not wire.has_room():
                self._wait(out=wire.fileno())

        slots, arrivals = ends_between(self.device, peer)
        sender = Sender(wire, self, wait_for_room, out, slots)
        receiver = Receiver(wire, self, arrivals, wait_for_values, come)
        self._intake.add(receiver)
        return sender, receiver

    def _wait(self, *fds: int, out: int | None = None) -> None:
        """Wait for something at a file descriptor, or for room at `out`.

        What the driver says is heard meanwhile, and what other workers send is taken in.

        Raises:
            Aborted: the driver has given up what is under way.
        """
        control = self._wire.fileno()
        while True:
            ready = self._intake.wait(control, *fds, out=out, patience=self.patience)
            if control in ready:
                self._read_message()
                if self.dispatch <= self._given_up:
                    raise Aborted
            if ready - {control}:
                return


def _places_of(tensors: Collection[torch.Tensor]) -> list[tuple[int, int]]:
    """Where each of these tensors begins, and its number of elements."""
    begins, counts = map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.numel, tensors)
    return list(zip(begins, counts, strict=True))


def _give_up(own: WorkerState) -> None:
    raise Aborted


def _unpacked(data: bytes, tensors: Sequence[Any], to: DeviceFor) -> Callable[[WorkerState], Any]:
    """The job, whose tensors are brought `to` devices; or one that says why it is not possible."""
    try:
        with loading():
            job: Callable[[WorkerState], Any] = unpack(data, tensors, to)
    except Exception as error:
        failure = error

        def job(own: WorkerState) -> Any:
            raise failure

    return job


def _named(error: BaseException, worker: int, doing: int) -> BaseException:
    """The error that says which worker failed, and in what."""
    if not doing or isinstance(error, PenstockError | Aborted):
        return error
    named = WorkerError(*Activity.of(doing).where, error, worker)
    named.__traceback__ = error.__traceback__
    return named
