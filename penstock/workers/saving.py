"""A checkpoint in portions: each worker writes what its stages own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch

from penstock.errors import InputError
from penstock.storage.part import Part
from penstock.workers.optimizer_parts import Parts
from penstock.workers.processes.shared_model import SharedModel
from penstock.workers.processes.worker_state import WorkerState

TIMEOUT = 3600.0  # seconds that the writing of a checkpoint may take


@dataclass
class Portion:
    """What belongs to one worker.

    Attributes:
        tensors: parameters and buffers, by the model's names.
        states: by optimizer, what those remember that are in this process, by parameters' names.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[Any, Any]] = field(default_factory=dict)


class SaveOrder(NamedTuple):
    """A save that begins.

    Attributes:
        folder: where to.
        number: of the save there.
        portions: for every worker.
        names: of all parameters, by the parameters' ids.
        remote: optimizers whose states are in worker processes, by name.
        background: whether to copy everything first, and then to return.
    """

    folder: str
    number: int
    portions: Sequence[Portion]
    names: Mapping[int, str]
    remote: Mapping[str, Parts]
    background: bool

    def parts(self, more: int = 0) -> list[Part]:
        """A part for every worker, and some more."""
        count = len(self.portions) + more
        return [Part(self.folder, self.number, k, count) for k in range(count)]

    def check_remote(self, known: Collection[Parts] = ()) -> None:
        """Raise if an optimizer is another pipeline's.

        Args:
            known: those that are this one's.

        Raises:
            InputError: one is not among them.
        """
        for label, parts in self.remote.items():
            if parts not in known:
                raise InputError(
                    f"{label}= belongs to another pipeline, in whose worker processes its state "
                    "is; make one with this pipeline's optimizer()"
                )

    def job(self, part: Part, portion: Portion) -> Callable[[], Thread | None]:
        """What writes a portion that is in this process."""
        return partial(part.save, portion.tensors, portion.states, self.background)


@dataclass(frozen=True)
class WritePart:
    """Have a worker process write its part.

    Attributes:
        part: which.
        tensors: their names, and the numbers by which the worker knows them.
        parameters: the names of all its parameters, by those numbers.
        optimizers: the numbers of optimizers, by the names under which they are saved.
        background: whether to copy everything first, and then to return.
    """

    part: Part
    tensors: Mapping[str, int]
    parameters: Mapping[int, str]
    optimizers: Mapping[str, int]
    background: bool

    def __call__(self, own: WorkerState) -> None:
        """Write this worker's tensors and optimizer state by their names in the checkpoint."""
        known = {id(own.tensors[number]): name for number, name in self.parameters.items()}
        states = {
            label: {known.get(id(k), k): v for k, v in own.optimizers[number].state.items()}
            for label, number in self.optimizers.items()
        }
        tensors = {name: own.tensors[number] for name, number in self.tensors.items()}
        self.part.save(tensors, states, self.background)


def divided(
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
