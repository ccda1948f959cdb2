"""What a Ray actor has: its rank, its modules and tensors, its parts of optimizers."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.board.memory import Reading
from penstock.engine.orders import Order
from penstock.errors import InputError, PenstockError
from penstock.links.handshake import Listener
from penstock.links.local import Aborted
from penstock.links.pickling import portable
from penstock.links.wire import SPIN
from penstock.workers.common_jobs import GivenValues
from penstock.workers.pool import Job
from penstock.workers.process_state import ProcessState, loading, unsent
from penstock.workers.ranks.operations import GivenUp
from penstock.workers.ranks.workers import RankTicket
from penstock.workers.ray.copies import ActorCopies, Copy, Taken
from penstock.workers.ray.pickled import Pickled, pickled, unpickled
from penstock.workers.ray.rank import ActorRank

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_FRAMES = 4  # of the stack of a worker that is late


class ActorState(ProcessState):
    """One worker, from the inside. Jobs are called with it.

    Its tensors are those of the whole model; those of other workers' stages are on `meta`.

    Args:
        worker: its number.

    Attributes:
        worker: its number.
        listener: where other workers connect to this one, until all have.
        store: that the process group is made with, if this worker has it.
        model: has all modules, by their names.
        tickets: of passes under way, in the order in which they were started.
        copies: of what it has, and of what others have.
        doing: the number of the job that it does.
        given_up: the number of the last job that was given up.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.patience = SPIN
        self.listener: Listener | None = None
        self.store: TCPStore | None = None
        self.model = nn.Module()
        self._have_nothing()
        self.tickets: deque[tuple[Order, RankTicket, Copy | None, GivenValues]] = deque()
        self.copies = ActorCopies()
        self.doing, self.given_up = -1, -2
        self._rank: ActorRank | None = None
        self._buffers: list[tuple[dict[str, Any], str, int]] = []

    @property
    def rank(self) -> ActorRank:
        """The rank that it is.

        Raises:
            PenstockError: it is none yet.
        """
        if self._rank is None:
            raise PenstockError("the actor has no plan yet")
        return self._rank

    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Those of these values that are kept here between passes, by number."""
        return self.rank.residents.fetch(numbers)

    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of these values that are kept here between passes."""
        self.rank.drop_states(numbers)

    def begin(self, rank: ActorRank) -> None:
        """Have this rank, with its stages, from now on."""
        self._rank = rank

    def empty(self, worker: int) -> None:
        """Let go of everything, and be another worker, as yet without a plan."""
        self.copies.close()
        if self._rank is not None:
            self._rank.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.__init__(worker)  # type: ignore[misc]

    def interrupt(self) -> None:
        """Have the pass that is waited for given up; called from another thread."""
        if self._rank is not None:
            self._rank.interrupt()

    def own_parameters(self) -> dict[int, nn.Parameter]:
        """Those of this worker's stages, by number."""
        own = set(map(id, self.rank.parameters))
        return {
            number: tensor
            for number, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and id(tensor) in own
        }

    def operation(self, what: str) -> AbstractContextManager[None]:
        """An operation of all ranks, if this names one."""
        return self.rank.operation(what) if what else nullcontext()

    def is_given_up(self) -> bool:
        """Whether the job that it does was given up; may be called from any thread."""
        return self.doing <= self.given_up

    # -- what forwards replace ------------------------------------------------------------

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Note where these modules have buffers that the script knows."""
        known = {id(tensor): number for number, tensor in self.tensors.items()}
        self._buffers += [
            (module._buffers, name, known[id(buffer)])
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in known
        ]

    def replaced(self) -> dict[int, torch.Tensor]:
        """What forwards have assigned to buffers and was not put back yet, by their numbers."""
        found = {number: registry[name] for registry, name, number in self._buffers}
        return {
            number: new
            for number, new in found.items()
            if new is not None
            and new is not (known := self.tensors[number])
            and (new.shape, new.dtype) == (known.shape, known.dtype)
        }

    @torch.no_grad()
    def put_buffers_back(self) -> list[int]:
        """Copy tensors that forwards have assigned to buffers into the buffers of the script.

        Returns:
            the numbers of these buffers.

        Raises:
            InputError: such a tensor has another shape or dtype than the buffer, or there are other
                replicas, which do not see it.
        """
        changed = []
        for registry, name, number in self._buffers:
            found, known = registry[name], self.tensors[number]
            if found is known or found is None:
                continue
            if found.shape != known.shape or found.dtype != known.dtype:
                raise InputError(
                    f"a forward has replaced the buffer {name!r} of shape {tuple(known.shape)} by "
                    f"one of shape {tuple(found.shape)}, {found.dtype}, which the script does not "
                    'see; use workers="threads"'
                )
            if self.rank.has_replicas:
                raise InputError(
                    f"a forward has replaced the buffer {name!r}, which replicas in other "
                    "processes do not see; change it in place (copy_), or use "
                    'workers="threads"'
                )
            known.copy_(found)
            registry[name] = known
            changed.append(number)
        return changed


class ActorReport(NamedTuple):
    """What has come of an actor's job.

    Attributes:
        failed: whether the value is what it has raised.
        value: its result.
        leaves: whether the actor was asked to end, by a SIGTERM.
        taken: the last copy that its buddy has.
    """

    failed: bool
    value: Pickled
    leaves: bool
    taken: Taken


class Actor:
    """The class of the Ray actors. Everything but the end is a job that the script sends.

    Args:
        worker: its number.
        hands_over: whether others can take over for it. Then a SIGTERM does not end it: from then
            on every report has `leaves=True`, and `leave` ends the actor.
    """

    def __init__(self, worker: int, hands_over: bool = False) -> None:
        self._state = ActorState(worker)
        self._lock = threading.Lock()  # of the numbers of jobs
        self._thread = 0
        self._leaves = False
        if hands_over:
            signal.signal(signal.SIGTERM, self._note_end)

    def _note_end(self, *_: object) -> None:
        self._leaves = True

    def leave(self) -> None:
        """End, as others have taken over."""
        from ray.actor import exit_actor

        exit_actor()

    def do(self, number: int, operation: str, packed: Pickled) -> ActorReport:
        """Do a job.

        If it is an operation of all ranks, they are told of whatever happens here, even if the job
        cannot be loaded, or was given up before it began: those who have begun wait for this one.

        Args:
            number: of the jobs that all workers have been given together.
            operation: the name of the operation of all ranks that the jobs are, if they are one.
            packed: the job.

        Returns:
            the result, or the error.
        """
        self._thread = threading.get_ident()
        own = self._state
        try:
            if number <= own.doing:  # the script was interrupted as it gave the job, and says so
                raise GivenUp
            with own.operation(operation):
                with self._lock:
                    own.doing = number
                    if own.is_given_up():
                        raise GivenUp
                with loading():
                    job: Callable[[ActorState], Any] = unpickled(packed)
                found, failed = job(own), False
                del job
        except GivenUp:
            found, failed = Aborted(), True
        except BaseException as error:  # a sys.exit() in a module must not end the actor
            found, failed = portable(error, f"worker {own.worker}"), True
        try:
            packed = pickled(found)
        except Exception as error:
            failed, packed = True, pickled(portable(unsent(error, own.worker)))
        return ActorReport(failed, packed, self._leaves, own.copies.taken)

    def give_up(self, number: int) -> None:
        """Give up this job and those before it; runs beside them, and may come after them."""
        with self._lock:
            self._state.given_up = max(self._state.given_up, number)
            if self._state.is_given_up():
                self._state.interrupt()

    def have_buddy(
        self, membership: int, worker: int, buddy: ActorHandle, number: int, has_twins: bool
    ) -> None:
        """Send another actor copies from now on, see `ActorCopies`."""
        self._state.copies.have_buddy(membership, worker, buddy, number, has_twins)

    def hold(self, membership: int, worker: int, packed: Pickled) -> bool:
        """Keep a copy of what another worker has, see `ActorCopies`; runs beside the jobs."""
        return self._state.copies.hold(membership, worker, packed)

    def copy_of(self, worker: int, number: int) -> Pickled:
        """The copy of this number of what a worker has, if it is here; runs beside the jobs."""
        return pickled(self._state.copies.copy_of(worker, number))

    def look(self) -> tuple[str, Reading, int]:
        """The stack of the thread that does jobs, and what the rank is doing; runs beside them.

        Last comes the time now, in nanoseconds of the clock by which the reading has its times.
        """
        try:
            rank = self._state.rank
        except PenstockError:
            return "starting", Reading.nothing(), time.monotonic_ns()
        frame = sys._current_frames().get(self._thread)
        stack = traceback.format_stack(frame)[-_FRAMES:] if frame else []
        texts = [*rank.stacks().values(), "".join(stack).rstrip()]
        return "\n".join(texts), rank.reading(), time.monotonic_ns()


def operation_of(job: Job) -> str:
    """The name of the operation of all ranks that a job is, which all of them have to begin."""
    return getattr(job, "operation", "")
