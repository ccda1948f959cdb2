"""Copies of what an actor has, of which one is with a buddy: another actor, on another node if any.

A copy has everything of one moment: parameters, buffers and gradients of the worker's stages, its
parts of optimizers, what forwards have left in its modules. What has changed is copied before a
pass, and sent to the buddy while the work goes on; or after a piece of work, and sent before that
counts as done. Replicas have the same parameters, buffers and gradients, so that there only parts
of optimizers and what forwards have left are sent.

An actor keeps its own copies as well, as all workers go back to the same moment. There may be two
of them: the last one that every worker has, and the one that is being sent.

Copies are in the memory of the buddy's process. An object in Ray's store dies with its owner, the
process that has put it there.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from penstock.capture.equality import same_tensor
from penstock.errors import InputError, PenstockError, WorkerDied
from penstock.links.local import Aborted
from penstock.workers.ray.pickled import Pickled, pickled, unpickled
from penstock.workers.remembering import ModuleMemory

VALUE, GRADIENT, STATE, PART, MEMORY = "value", "gradient", "state", "part", "memory"
"""What is in a copy: of a tensor its value or its gradient; of an optimizer what it remembers of a
parameter, and that the worker has a part of it at all; what forwards have left in modules."""

EVERYTHING = (VALUE, GRADIENT, STATE, PART, MEMORY)

_SHARED = (VALUE, GRADIENT)  # by the workers at the same place of all replicas
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAUSE = 0.2  # seconds until something is sent again
_SLICE = 0.5  # seconds that are waited at once

UNSENT = "the work was done, and given up before its copy had arrived"
"""What an `Aborted` says that comes of it; it never reaches a user."""

Entries = dict[tuple[Any, ...], Any]
"""What is in a copy, by what it is, and the number of the tensor or the optimizer."""


class Copy(NamedTuple):
    """A copy that is to be made.

    Attributes:
        number: of the copy; numbers grow.
        safe: the number of the last one that every buddy has; older ones are not needed any more.
        timeout: seconds that the buddy has to take it.
    """

    number: int
    safe: int
    timeout: float


class Taken(NamedTuple):
    """The last copy that a worker's buddy has taken.

    Attributes:
        number: of the copy; -1 if there is none.
        seconds: from when it was begun until the buddy had it.
    """

    number: int = -1
    seconds: float = 0.0


class Holder(Protocol):
    """Who has what is copied, see `ActorState`."""

    tensors: dict[int, torch.Tensor]
    optimizers: dict[int, Optimizer]
    memory: ModuleMemory

    def replaced(self) -> Mapping[int, torch.Tensor]:
        """What forwards have assigned to buffers, by the numbers of these."""

    def remembered(self, number: int) -> dict[Any, dict[str, Any]]:
        """What a part of an optimizer remembers, by the numbers of parameters."""


class Change(NamedTuple):
    """What is different in a copy from an older one.

    Attributes:
        number: of the copy.
        safe: see `Copy`.
        base: the number of the older one; `None` if there is none.
        changed: what has changed, or is new.
        gone: what is not there any more.
    """

    number: int
    safe: int
    base: int | None
    changed: Entries
    gone: Collection[tuple[Any, ...]]


class Shelf:
    """The copies of what one worker has that may still be needed."""

    def __init__(self) -> None:
        self._copies: dict[int, Entries] = {}

    def put(self, change: Change) -> bool:
        """Add a copy; returns `False`, and adds none, if the one it is based on is not here."""
        before = {} if change.base is None else self._copies.get(change.base)
        if before is None:
            return False
        gone = set(change.gone)
        kept = {key: value for key, value in before.items() if key not in gone}
        self._copies = {n: e for n, e in self._copies.items() if n >= change.safe}
        self._copies[change.number] = kept | change.changed
        return True

    def copy(self, number: int | None) -> Entries | None:
        """The copy of this number, if it is there."""
        return None if number is None else self._copies.get(number)


class ActorCopies:
    """The copies that an actor has: its own, and those of workers whose buddy it is.

    Attributes:
        taken: the last one that the buddy of this worker has taken.
    """

    def __init__(self) -> None:
        self._own = Shelf()
        self._held: dict[int, Shelf] = {}
        self._membership: int | None = None
        self._worker = self._buddy_number = 0
        self._buddy: Any = None
        self._leaves_out: tuple[str, ...] = ()
        self._made: dict[int, tuple[Change, float]] = {}  # and not yet sent; how long it took
        self._sender: threading.Thread | None = None
        self._problem: PenstockError | None = None  # of what was sent while work went on
        self._is_closed = False
        self.taken = Taken()

    def have_buddy(
        self, membership: int, worker: int, buddy: Any, number: int, has_twins: bool
    ) -> None:
        """From now on copies can be sent and held.

        Args:
            membership: the number of the members that this worker is one of.
            worker: its number among them.
            buddy: the handle of another actor.
            number: of that.
            has_twins: whether other replicas have the same parameters, buffers and gradients.
        """
        self._membership, self._worker = membership, worker
        self._buddy, self._buddy_number = buddy, number
        self._leaves_out = _SHARED if has_twins else ()

    # -- its own --------------------------------------------------------------------------

    def make(self, own: Holder, what: Copy) -> None:
        """Copy what has changed since the last copy that the buddy has taken."""
        began = time.monotonic()
        last = self.taken.number
        before = self._own.copy(last)
        base = None if before is None else last
        before = before or {}
        changed: Entries = {}
        there = set()
        with torch.no_grad():
            for key, value in _content(own):
                there.add(key)
                if key not in before or not _is_same(before[key], value):
                    changed[key] = _copied(value)
        gone = [key for key in before if key not in there]
        change = Change(what.number, what.safe, base, changed, gone)
        self._own.put(change)
        self._made = {n: made for n, made in self._made.items() if n > what.safe}
        self._made[what.number] = change, time.monotonic() - began

    def send(self, what: Copy, is_given_up: Callable[[], bool]) -> None:
        """Have the buddy take a copy that was made; it is sent again if it is lost on the way.

        Args:
            what: the copy.
            is_given_up: says whether the work was given up meanwhile.

        Raises:
            Aborted: the work was given up; the message is `UNSENT`.
            WorkerDied: the buddy has died, or does not take it in time.
        """
        while self._sender is not None and self._sender.is_alive():
            self._sender.join(_PAUSE)
            if is_given_up():
                raise Aborted(UNSENT)
        self.check()
        self._send(*self._made.pop(what.number), what.timeout, is_given_up)

    def send_meanwhile(self, what: Copy) -> None:
        """Have the buddy take a copy that was made, after those before it, while work goes on."""
        made = self._made.pop(what.number)
        arguments = self._sender, *made, what.timeout, lambda: self._is_closed
        self._sender = threading.Thread(target=self._send_after, args=arguments, daemon=True)
        self._sender.start()

    def _send_after(self, before: threading.Thread | None, *arguments: Any) -> None:
        if before is not None:
            before.join()
        try:
            self._send(*arguments)
        except Aborted:
            return
        except WorkerDied as death:
            self._problem = death
        except Exception as error:
            self._problem = InputError(
                f"what worker {self._worker} has cannot be copied for its buddy: "
                f"{type(error).__name__}: {error}"
            )

    def check(self) -> None:
        """Raise if the buddy has not taken what was sent while other work went on.

        Raises:
            WorkerDied: as of `send`.
            InputError: it cannot be sent.
        """
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Send nothing any more."""
        self._is_closed = True

    def _send(
        self, change: Change, seconds: float, timeout: float, is_given_up: Callable[[], bool]
    ) -> None:
        """See `send`.

        Args:
            change: what is sent.
            seconds: that it took to be made.
            timeout: seconds that the buddy has to take it.
            is_given_up: whether that is not wanted any more.
        """
        began = time.monotonic()
        sent = {k: v for k, v in change.changed.items() if k[0] not in self._leaves_out}
        packed = pickled(change._replace(changed=sent))
        deadline = time.monotonic() + timeout
        why = "it does not answer"
        while time.monotonic() < deadline and not is_given_up():
            try:
                if self._is_taken(packed, deadline, is_given_up):
                    self.taken = Taken(change.number, seconds + time.monotonic() - began)
                    return
                why = "it belongs to other members, or has not the copy before"
                break
            except Aborted:
                raise
            except Exception as error:
                why = " ".join(str(error).split())
                if _is_dead(error):
                    break
                time.sleep(_PAUSE)  # it was lost on the way, say
        if is_given_up():
            raise Aborted(UNSENT)
        raise WorkerDied(
            self._buddy_number,
            f"has not taken copy {change.number} of what worker {self._worker} has ({why});",
            None,
            None,
            "copying",
        )

    def _is_taken(self, packed: Pickled, deadline: float, is_given_up: Callable[[], bool]) -> bool:
        """Send something to the buddy; whether it has taken it.

        Raises:
            Aborted: the work was given up.
            TimeoutError: there is no answer in time.
        """
        import ray

        beside = self._buddy.hold.options(concurrency_group="control")
        answer = beside.remote(self._membership, self._worker, packed)
        while not ray.wait([answer], timeout=_SLICE)[0]:
            if is_given_up():
                raise Aborted(UNSENT)
            if time.monotonic() > deadline:
                raise TimeoutError("it does not answer")
        return bool(ray.get(answer))

    # -- those of others ------------------------------------------------------------------

    def hold(self, membership: int, worker: int, packed: Pickled) -> bool:
        """Keep what another worker sends, if both belong to the same members; whether that is so.

        Runs beside the jobs.
        """
        if membership != self._membership:
            return False
        return self._held.setdefault(worker, Shelf()).put(unpickled(packed))

    def copy_of(self, worker: int, number: int) -> Entries | None:
        """The copy of this number of what this or another worker has, if it is here."""
        shelf = self._own if worker == self._worker else self._held.get(worker, Shelf())
        return shelf.copy(number)


def _is_dead(error: Exception) -> bool:
    """Whether Ray says that the actor which was called is gone."""
    import ray

    return isinstance(error, ray.exceptions.RayActorError)


def _content(own: Holder) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What a worker has, by its key in a copy."""
    replaced = own.replaced()
    for number, tensor in own.tensors.items():
        if tensor.is_meta:
            continue
        yield (VALUE, number), replaced.get(number, tensor).detach()
        if tensor.grad is not None:
            yield (GRADIENT, number), tensor.grad
    for number in own.optimizers:
        yield (PART, number), True
        for key, remembered in own.remembered(number).items():
            yield (STATE, number, key, None), list(remembered)
            for name, value in remembered.items():
                yield (STATE, number, key, name), value
    yield (MEMORY,), own.memory.found()


def _is_same(before: Any, now: Any) -> bool:
    """Whether a value is known to be what it was, bit for bit; tensors in the same layout, too."""
    if not (isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor)):
        return now is True and before is True
    bits = _BITS.get(now.element_size())
    if bits is None or now.is_complex() or not before.layout is now.layout is torch.strided:
        return same_tensor(before, now)
    if (before.shape, before.dtype, before.stride()) != (now.shape, now.dtype, now.stride()):
        return False
    return torch.equal(before.view(bits), now.view(bits))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
