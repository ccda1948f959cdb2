"""Copies of what an actor has, of which one is with a buddy: another actor, on another node if any.

A copy has everything of one moment: parameters, buffers and gradients of the worker's stages, its
parts of optimizers, what forwards have left in its modules. Making one copies in memory what has
changed since the one before; a thread sends that to the buddy meanwhile. Replicas have the same
parameters, buffers and gradients, so that there only parts of optimizers are sent.

An actor keeps its own copies as well, as all workers go back to the same moment. The script lets
nobody make a copy before the one before it has arrived everywhere, so the last two are enough.

Copies are in the memory of the buddy's process. An object in Ray's store dies with its owner, the
process that has put it there.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from penstock.capture.equality import same_tensor
from penstock.errors import PenstockError
from penstock.links.local import Aborted
from penstock.workers.processes.remembering import Memory
from penstock.workers.ray.parcel import Parcel, unwrapped, wrapped

VALUE, GRADIENT, STATE, PART, MEMORY = "value", "gradient", "state", "part", "memory"
"""What is in a copy: of a tensor its value or its gradient; of an optimizer what it remembers of a
parameter, and that the worker has a part of it at all; what forwards have left in modules."""

_SHARED = (VALUE, GRADIENT, MEMORY)  # by the workers at the same place of all replicas

Entries = dict[tuple[Any, ...], Any]
"""What is in a copy, by what it is, and the number of the tensor or the optimizer."""


class Holder(Protocol):
    """Who has what is copied, see `ActorState`."""

    tensors: dict[int, torch.Tensor]
    optimizers: dict[int, Optimizer]
    memory: Memory

    def remembered(self, number: int) -> dict[Any, dict[str, Any]]:
        """What a part of an optimizer remembers, by the numbers of parameters."""


class Change(NamedTuple):
    """What is different in a copy from the one before.

    Attributes:
        number: of the copy.
        changed: what has changed, or is new.
        gone: what is not there any more.
    """

    number: int
    changed: Entries
    gone: Collection[tuple[Any, ...]]


class Shelf:
    """The last two copies of what one worker has."""

    def __init__(self) -> None:
        self._copies: dict[int, Entries] = {}

    def before(self, number: int) -> Entries:
        """The copy before this one."""
        return self._copies.get(number - 1, {})

    def put(self, change: Change) -> None:
        """Have one more copy; one of the same number was given up."""
        before = self.before(change.number)
        gone = set(change.gone)
        entries = {key: value for key, value in before.items() if key not in gone}
        self._copies = {change.number - 1: before, change.number: entries | change.changed}

    def copy(self, number: int) -> Entries | None:
        """The copy of this number, if it is there."""
        return self._copies.get(number)


class ActorCopies:
    """The copies that an actor has: its own, and those of workers whose buddy it is.

    Attributes:
        arrived: the number of its own latest copy that its buddy has.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._own = Shelf()
        self._held: dict[int, Shelf] = {}
        self._buddy: Any = None
        self._worker = 0
        self._leaves_out: tuple[str, ...] = ()
        self._news = threading.Condition()
        self._failure: Exception | None = None
        self._sender: threading.Thread | None = None
        self._waits = self._is_given_up = False

    def have_buddy(self, worker: int, buddy: Any, has_twins: bool) -> None:
        """From now on copies are sent.

        Args:
            worker: the number of this one.
            buddy: the handle of an actor; `None` if there is no other one.
            has_twins: whether other replicas have the same parameters, buffers and gradients.
        """
        self._worker, self._buddy = worker, buddy
        self._leaves_out = _SHARED if has_twins else ()

    # -- its own --------------------------------------------------------------------------

    def make(self, own: Holder, number: int) -> None:
        """Make a copy, and begin to send it.

        What forwards have left in modules is looked at if they have ever left anything there, and
        else at first, and more and more rarely.

        Args:
            own: whose.
            number: of the copy.
        """
        before = self._own.before(number)
        tells = number < 3 or not number & (number - 1) or bool(before.get((MEMORY,)))
        changed: Entries = {}
        there = set()
        with torch.no_grad():
            for key, value in _content(own, tells):
                there.add(key)
                if key not in before or not _is_same(before[key], value):
                    changed[key] = _copied(value)
        gone = [key for key in before if key not in there and (tells or key[0] != MEMORY)]
        self._own.put(Change(number, changed, gone))
        sent = {key: v for key, v in changed.items() if key[0] not in self._leaves_out}
        self._sender = threading.Thread(
            target=self._send,
            args=(Change(number, sent, gone), self._sender),
            name="penstock-copy",
            daemon=True,
        )
        with self._news:
            self.arrived, self._failure = min(self.arrived, number - 1), None
        self._sender.start()

    def _send(self, change: Change, before: threading.Thread | None) -> None:
        """Send what has changed to the buddy, in a thread of its own, after the one before."""
        import ray

        if before is not None:
            before.join()
        failure = None
        try:
            if self._buddy is not None:
                beside = self._buddy.hold.options(concurrency_group="control")
                ray.get(beside.remote(self._worker, wrapped(change)))
        except Exception as error:  # the buddy has died, which the script notices as well
            failure = error
        with self._news:
            if self._sender is threading.current_thread():  # else another one takes its place
                self._failure = failure
                self.arrived = change.number if failure is None else self.arrived
                self._news.notify_all()

    def wait(self, number: int, timeout: float) -> None:
        """Wait until a copy has arrived.

        Raises:
            Aborted: the wait was given up.
            PenstockError: the buddy has not taken it.
        """
        with self._news:
            self._waits, self._is_given_up = True, False
            self._news.wait_for(lambda: self._is_over(number), timeout)
            self._waits = False
            if self.arrived >= number:
                return
            if self._is_given_up:
                raise Aborted
        why = f"within {timeout:.0f} s" if self._failure is None else f"({self._failure})"
        raise PenstockError(
            f"the buddy of worker {self._worker} has not taken copy {number} of what that has {why}"
        )

    def _is_over(self, number: int) -> bool:
        """Whether a copy has arrived, or will not."""
        return self.arrived >= number or self._failure is not None or self._is_given_up

    def interrupt(self) -> None:
        """Have the wait for a copy given up; called from another thread."""
        with self._news:
            self._is_given_up = self._waits
            self._news.notify_all()

    # -- those of others ------------------------------------------------------------------

    def hold(self, worker: int, parcel: Parcel) -> None:
        """Keep what another worker sends; runs beside the jobs."""
        self._held.setdefault(worker, Shelf()).put(unwrapped(parcel))

    def all_of(self, number: int) -> Mapping[int | None, Entries]:
        """The copies of this number, by whose they are; its own under `None`."""
        shelves: list[tuple[int | None, Shelf]] = [(None, self._own), *self._held.items()]
        found = {worker: shelf.copy(number) for worker, shelf in shelves}
        return {worker: entries for worker, entries in found.items() if entries is not None}


def _content(own: Holder, tells: bool) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that a worker has."""
    for number, tensor in own.tensors.items():
        if not tensor.is_meta:
            yield (VALUE, number), tensor.detach()
            if tensor.grad is not None:
                yield (GRADIENT, number), tensor.grad
    for number in own.optimizers:
        yield (PART, number), True
        for key, remembered in own.remembered(number).items():
            yield (STATE, number, key, None), list(remembered)
            for name, value in remembered.items():
                yield (STATE, number, key, name), value
    if tells:
        yield (MEMORY,), own.memory.found()


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return same_tensor(before, now)
    return now is True and before is True


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
