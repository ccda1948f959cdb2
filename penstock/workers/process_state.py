"""What a worker in another process has: one of this machine, or an actor of a cluster."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import InputError
from penstock.links.pickling import Inbox
from penstock.workers.remembering import ModuleMemory
from penstock.workers.ways import NewWay


class ProcessState(ABC):
    """The state of a worker's process, with which jobs for several kinds of workers are called.

    Attributes:
        patience: seconds for which it polls before it sleeps.
        tensors: parameters and buffers of the model, by the numbers by which the driver knows them.
        modules: the user's, in the order in which they came.
        memory: what these modules and their hooks held when they came.
        inbox: unpacks stages; modules that several have in common are the same objects.
        optimizers: this worker's part of each optimizer, by number.
    """

    patience: float
    tensors: dict[int, torch.Tensor]
    modules: list[nn.Module]
    memory: ModuleMemory
    inbox: Inbox
    optimizers: dict[int, Optimizer]

    def _have_nothing(self) -> None:
        """Have no part of a model and no optimizer, as at the beginning."""
        self.tensors = {}
        self.modules = []
        self.memory = ModuleMemory(self.modules, self.tensors)
        self.inbox = Inbox(self.tensors.__getitem__)
        self.optimizers = {}

    @abstractmethod
    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Note where these modules have buffers that the driver knows."""

    @abstractmethod
    def fetch_states(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Those of these values that are kept here between passes, by number."""

    @abstractmethod
    def drop_states(self, numbers: Sequence[int]) -> None:
        """Let go of these values that are kept here between passes."""

    def unpack_way(self, way: bytes, modules: bytes) -> tuple[NewWay, list[nn.Module]]:
        """A way, and the user's modules that come with it, which are noted as they are now.

        Raises:
            InputError: something cannot be unpacked in this process.
        """
        with loading():
            new_way: NewWay = self.inbox.unpack(way)
            new: list[nn.Module] = self.inbox.unpack(modules)
        self.modules += new
        self.watch(new)
        self.memory.note_new()
        return new_way, new

    def parameters(self, numbers: Sequence[int] | None) -> list[nn.Parameter] | None:
        """The parameters with these numbers; `None` (all of them) stays `None`."""
        found = None if numbers is None else (self.tensors[number] for number in numbers)
        return None if found is None else [t for t in found if isinstance(t, nn.Parameter)]

    def remembered(self, number: int) -> dict[Any, dict[str, Any]]:
        """The state of its part of an optimizer, by the numbers of parameters.

        State that belongs to no parameter is under its own keys.
        """
        numbers: dict[int, Any] = {id(tensor): number for number, tensor in self.tensors.items()}
        state = self.optimizers[number].state
        return {numbers.get(id(key), key): value for key, value in state.items()}


def freeze() -> None:
    """Collect garbage; what is there now stays, and is not looked at in later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def loading() -> Iterator[None]:
    """While open, an error says that what has been sent cannot be unpacked here.

    Raises:
        InputError: instead of any other.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(
            "a worker's process cannot load what it was sent: "
            f"{type(error).__name__}: {error}. It imports modules by their names, on the sys.path "
            'of this process; use workers="threads" for what cannot be imported'
        ) from error


def unsent(error: Exception, worker: int) -> BaseException:
    """The error of a worker whose result cannot be pickled."""
    found = InputError(
        f"the result of worker {worker} cannot be sent to the script's process: "
        f'{type(error).__name__}: {error}. Use workers="threads"'
    )
    found.__cause__ = error
    return found
