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

TIMEOUT = 3600.0  # seconds that the writing of a checkpoint may take


@dataclass
class Portion:
    """What one worker owns, and writes.

    Attributes:
        tensors: parameters and buffers, by their names in the model.
        states: by optimizer, its state in this process, by the names of parameters.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[Any, Any]] = field(default_factory=dict)


class SaveOrder(NamedTuple):
    """A save that begins.

    Attributes:
        folder: the path of the folder of checkpoints.
        number: the number of the save in this folder.
        portions: for every worker what it owns.
        names: the names of all parameters, by their ids.
        remote: by name, the optimizers whose states are in worker processes.
        background: whether to return once everything is copied, before it is written.
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
