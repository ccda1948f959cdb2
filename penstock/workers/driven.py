"""Workers in other processes, which this one drives by jobs: on this machine or in a cluster."""

from __future__ import annotations

import threading
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from penstock.capture.attributes import named_tensors
from penstock.capture.trees import tree_leaves
from penstock.engine.ends import Loss
from penstock.errors import BY_USER, InputError, closed
from penstock.links.pickling import Packed, pack
from penstock.storage.part import Part
from penstock.workers.backend import Workers
from penstock.workers.common_jobs import DropResidents, FetchMemory, FetchResidents, WritePart
from penstock.workers.following import AttributeChanges
from penstock.workers.memories import Losses, SideEffects
from penstock.workers.pool import Job, Pool
from penstock.workers.remembering import Finder, Found, StateKey, changes, check_apart, make_all
from penstock.workers.saving import TIMEOUT, Portion, SaveOrder


class DrivenWorkers(Workers):
    """What worker processes and actors have in common.

    Args:
        pool: runs their jobs.
        model: the whole model, which this process has.
    """

    def __init__(self, pool: Pool, model: nn.Module) -> None:
        self._pool = pool
        self._whole = model
        self._forgotten: deque[tuple[bool, int]] = deque()
        self._losses = Losses()
        self._lock = threading.RLock()  # a signal's handler may close, too
        self._starter: int | None = None  # the thread that gave the last jobs
        self._closer: int | None = None  # the one that closes
        self._warned_of: set[str] = set()

    @abstractmethod
    def _run(self, jobs: Sequence[Job], *, timeout: float | None = None) -> list[Any]:
        """Run a job on every worker, and wait for all.

        Args:
            jobs: by worker.
            timeout: seconds; by default those that a pass may take.
        """

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """While open, no other thread closes.

        Raises:
            ClosedError: one does.
        """
        with self._lock:
            if self._closer not in (None, threading.get_ident()):
                raise closed(BY_USER)
            self._starter = threading.get_ident()
            yield

    def _may_end(self) -> bool:
        """Keep other threads from starting jobs; returns whether the workers are free for more.

        They are not while jobs are under way that another thread has started.
        """
        me = threading.get_ident()
        with self._lock:
            self._closer = me
            return not self._pool.under_way or self._starter == me

    def forget(self, training: bool, number: int) -> None:
        """Let go of what stages hold of this batch, with the next pass."""
        self._forgotten.append((training, number))

    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Copies of the values that are with the workers."""
        found: list[dict[int, torch.Tensor]] = self._run(
            [FetchResidents(tuple(numbers))] * len(self.members)
        )
        return {number: value for each in found for number, value in each.items()}

    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of values that stay with the workers."""
        self._run([DropResidents(tuple(numbers))] * len(self.members))

    @abstractmethod
    def _finders(self) -> list[Finder]:
        """For every place in a replica, what finds the modules and tensors of workers there."""

    def _warn_of(self, written: Iterable[str]) -> None:
        """Warn once of each of the script's tensors that other processes have written to."""
        for name in {*written} - self._warned_of:
            self._warned_of.add(name)
            who = "the model writes to its" if name == "inputs" else "the loss writes to its"
            warnings.warn(
                f"{who} {name} in place. The workers have copies of them, so what is written is "
                "lost, other than on one device: the script's tensors stay as they were, and come "
                'so with the next step. Use workers="threads", or write to copies '
                "(tensor.clone()); what a loss remembers can be in buffers of a module",
                stacklevel=2,
            )

    def _write(self, save: SaveOrder, shared: Numbered) -> list[Part]:
        """Have every worker write its part of a checkpoint, and this process what is left."""
        places = [member.place for member in self.members]
        jobs, rest, portion, count = divided(save, shared, places)
        self._run(jobs, timeout=TIMEOUT)
        if rest is not None:
            save.job(rest, portion)()
        return save.parts(count - len(jobs))

    @property
    def are_leaving(self) -> bool:
        """Whether some were asked to end, and others can take over."""
        return self._pool.keeps_survivors and bool(self._pool.leaving)

    def left(self) -> SideEffects:
        """What forwards have left with the workers, and what losses may remember."""
        return self._side_effects(self._run([FetchMemory()] * len(self.members)))

    def _side_effects(self, found: Sequence[Mapping[StateKey, Found]]) -> SideEffects:
        """What forwards have left with the workers, to be brought to the modules of this process.

        Args:
            found: what every worker has, by its index.

        Raises:
            InputError: something cannot be brought here, or workers have different things.
        """
        made = []
        for place, finder in enumerate(finders := self._finders()):
            own = [found[k] for k, member in enumerate(self.members) if member.place == place]
            made.append(changes(own, finder, partial(name_of, self._whole, finder)))
        check_apart(made, [finder.modules for finder in finders])
        every = [change for own in made for change in own]
        names = [change.name for change in every]
        names += ["the loss function or the metrics"] if self._losses.may_remember() else []
        return SideEffects(", ".join(names), lambda: make_all(every))

    def stacks(self) -> Mapping[int, str]:
        """What the workers are doing, with the stacks of all their threads."""
        return self._pool.describe(self.recorded)

    def all_alive(self) -> bool:
        """Whether none has ended, as far as is known."""
        return self._pool.all_alive()


class Numbered(Protocol):
    """Tensors that workers know by numbers, see `SharedModel`."""

    def number(self, place: int, tensor: Any) -> int | None:
        """The number by which the workers at a place know a tensor."""

    def names(self, place: int, names: Mapping[int, str]) -> dict[int, str]:
        """The names of the tensors of the workers at a place, by their numbers there.

        Args:
            place: of the workers.
            names: the names of all tensors, by id.
        """


def divided(
    save: SaveOrder, shared: Numbered, places: Sequence[int]
) -> tuple[list[WritePart], Part | None, Portion, int]:
    """What worker processes write, and what is left for their driver.

    Args:
        save: what is to be written.
        shared: the tensors that they share.
        places: of all workers.

    Returns:
        the jobs; the driver's part, if it has one, its portion, and how many parts there are.
    """
    left = Portion()
    found: list[tuple[dict[str, int], dict[int, str]]] = []
    for place, portion in zip(places, save.portions, strict=True):
        known = {n: shared.number(place, t) for n, t in portion.tensors.items()}
        own = {name: number for name, number in known.items() if number is not None}
        left.tensors |= {n: t for n, t in portion.tensors.items() if n not in own}
        for label, states in portion.states.items():
            left.states.setdefault(label, {}).update(states)
        found.append((own, shared.names(place, save.names)))
    numbers = {label: p.number for label, p in save.remote.items() if p.number is not None}
    parts = save.parts(more=int(bool(left.tensors or any(left.states.values()))))
    jobs = [
        WritePart(part, own, parameters, numbers, save.background)
        for part, (own, parameters) in zip(parts, found, strict=False)
    ]
    rest = parts[len(found)] if len(parts) > len(found) else None
    return jobs, rest, left, len(parts)


def name_of(model: nn.Module, finder: Finder, key: StateKey) -> str:
    """A place in a model, in words."""
    if key.kind == "tensor":
        tensor = finder.tensors[key.number]
        names = (name for name, own in named_tensors(model) if own is tensor)
        return f"what a hook of {next(names, 'a tensor')!r} remembers"
    module = finder.modules[key.number]
    path = next((path for path, own in model.named_modules() if own is module), "")
    where = f"{path!r} ({type(module).__name__})" if path else f"the {type(module).__name__}"
    if key.registry:
        return f"what a hook of the module {where} remembers"
    return f"the attribute {key.name!r} of the module {where}"


def pack_named(what: str, obj: Any) -> Packed:
    """Pack an object that is to be sent to a worker.

    Args:
        what: the name of the object in the message of the error.
        obj: the object.

    Raises:
        InputError: it cannot be sent.
    """
    try:
        return pack(obj)
    except Exception as error:
        raise InputError(
            f"{what} cannot be sent to a worker's process: {type(error).__name__}: {error}. "
            'Use workers="threads"'
        ) from error


@torch.no_grad()
def bring(buffers: Sequence[torch.Tensor], loss: Loss | None) -> None:
    """Copy the buffers of a loss from the worker's process that called it to the script's loss."""
    for mine, theirs in zip(loss.buffers if loss else (), buffers, strict=True):
        mine.copy_(theirs)


def packed_changes(changes: AttributeChanges, modules: Sequence[nn.Module]) -> Packed | None:
    """The attributes of a worker's modules that have changed, if some have."""
    if not changes:
        return None
    kinds = [type(module).__name__ for module in modules]
    names = [f"{kinds[k]}.{name}" for k, names in changes.items() for name in names]
    return pack_named(f"what was changed ({', '.join(names)})", changes)


def packed_loss(loss: Loss, backward: bool) -> Packed:
    """A loss, to be sent to the worker that has the last stage.

    Args:
        loss: with the batch's targets.
        backward: whether there are gradients at all.

    Raises:
        InputError: it cannot be sent; or it or a target has tensors that ask for a gradient, which
            would be left in a worker's process.
    """
    try:
        found = pack(loss)
    except Exception:
        pack_named("the loss function", (loss.function, loss.more))
        pack_named("the target or the metrics function", (loss.targets, loss.metrics))
        raise
    if not backward:
        return found
    if _ask_for_gradients(found.tensors) and _ask_for_gradients(
        pack((loss.function, loss.more)).tensors
    ):
        raise InputError(
            "the loss function uses parameters, or other tensors that require a gradient, which "
            "would be left in a worker's process. Make it a part of the model, or use "
            'workers="threads"'
        )
    if _ask_for_gradients(tree_leaves(loss.targets)):
        raise InputError(
            "the target requires a gradient, which would be left in a worker's process; give "
            'target.detach(), or use workers="threads"'
        )
    return found


def _ask_for_gradients(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
