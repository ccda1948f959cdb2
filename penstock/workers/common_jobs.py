"""Jobs that drivers give to workers in other processes, on this machine or in a cluster.

A job is data, and is called with the worker's `ProcessState`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from penstock.board.activity import STARTING
from penstock.capture.trees import cloned, map_leaves, versions
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import use_threads
from penstock.devices.kind import DeviceKind
from penstock.devices.settings import TorchSettings
from penstock.engine.hooks import silenced
from penstock.engine.orders import Order
from penstock.engine.state import kept
from penstock.links.wire import SPIN
from penstock.loading import (
    tolerate_missing_torchvision_operators,
    tolerates_missing_torchvision_operators,
)
from penstock.storage.part import Part
from penstock.workers.assembly import Assembly
from penstock.workers.following import AttributeChanges, follow
from penstock.workers.process_state import ProcessState
from penstock.workers.remembering import Found, StateKey
from penstock.workers.ways import modules_of


@dataclass(frozen=True)
class Modes:
    """The settings of a process that do not belong to the model.

    Attributes:
        threads: intra-op threads.
        crowded: whether there are more workers than cores.
        keep_freed_memory: whether freed memory stays with the process, see
            `penstock.devices.allocator`.
        settings: the settings of torch when the workers start.
        torchvision: whether torchvision's operators are missing, and were declared.
    """

    doing: ClassVar[int] = STARTING

    threads: int
    crowded: bool
    keep_freed_memory: bool
    settings: TorchSettings
    torchvision: bool

    @classmethod
    def here(
        cls, threads: int, workers: int, keep_freed_memory: bool, kind: DeviceKind | None = None
    ) -> Modes:
        """The settings of this process, for this many workers and a kind of device."""
        return cls(
            threads,
            workers > len(os.sched_getaffinity(0)),
            keep_freed_memory,
            TorchSettings.here(kind),
            tolerates_missing_torchvision_operators(),
        )

    def __call__(self, own: ProcessState) -> None:
        """Give this process the driver's settings of torch."""
        use_threads(self.threads)
        own.patience = 0.0 if self.crowded else SPIN
        if self.keep_freed_memory:
            keep_freed_memory()
        self.settings.apply()
        if self.torchvision:
            tolerate_missing_torchvision_operators()


@dataclass(frozen=True)
class FetchResidents:
    """Values that this worker keeps between passes, by number.

    Attributes:
        numbers: of those that are wanted.
    """

    numbers: Sequence[int]

    def __call__(self, own: ProcessState) -> dict[int, torch.Tensor]:
        """Return those of the values that this worker has; other workers have the rest."""
        return own.fetch_states(self.numbers)


@dataclass(frozen=True)
class DropResidents:
    """Let go of values that this worker keeps between passes.

    Attributes:
        numbers: the numbers of these values.
    """

    numbers: Sequence[int]

    def __call__(self, own: ProcessState) -> None:
        """Drop those that this worker has, see `WorkerState.drop_states`."""
        own.drop_states(self.numbers)


@dataclass(frozen=True)
class FetchOptimizerState:
    """What this worker's part of an optimizer remembers, by the numbers of parameters.

    Attributes:
        number: the number of the optimizer.
    """

    number: int

    def __call__(self, own: ProcessState) -> dict[Any, Any]:
        """Return the state; what belongs to no parameter is under other keys than numbers."""
        return own.remembered(self.number)


@dataclass(frozen=True)
class LoadOptimizerState:
    """Let this worker's part of an optimizer remember something else.

    Attributes:
        number: of the optimizer.
        state: by the numbers of parameters.
        others: what belongs to no parameter, by its own keys; every part has it.
    """

    number: int
    state: Mapping[int, Any]
    others: Mapping[Any, Any]

    @classmethod
    def of(
        cls, number: int, state: Mapping[Any, Any], owned: Mapping[int, torch.Tensor]
    ) -> LoadOptimizerState:
        """The job for a worker's share of a state.

        Args:
            number: of the optimizer.
            state: of all parameters, by the parameters themselves.
            owned: the worker's parameters, by their numbers.
        """
        own = {k: state[parameter] for k, parameter in owned.items() if parameter in state}
        others = {key: v for key, v in state.items() if not isinstance(key, torch.Tensor)}
        return cls(number, own, others)

    def __call__(self, own: ProcessState) -> None:
        """Set the state, as copies: the memory in which it came is only borrowed."""
        part = own.optimizers[self.number]
        part.state.clear()
        for number, values in self.state.items():
            part.state[own.tensors[number]] = map_leaves(cloned, values)
        for key, values in self.others.items():
            part.state[key] = map_leaves(cloned, values)


@dataclass(frozen=True)
class FetchMemory:
    """What this worker's forwards have left in its modules and hooks."""

    def __call__(self, own: ProcessState) -> dict[StateKey, Found]:
        """Return what has changed in modules and hooks since they came."""
        return own.memory.found()


@dataclass(frozen=True)
class WritePart:
    """Have a worker process write its part of a checkpoint.

    Attributes:
        part: the part to be written.
        tensors: by name in the checkpoint, the number by which the worker knows the tensor.
        parameters: the names of all its parameters, by such numbers.
        optimizers: the numbers of optimizers, by the names under which they are saved.
        background: whether to return once everything is copied, before it is written.
    """

    part: Part
    tensors: Mapping[str, int]
    parameters: Mapping[int, str]
    optimizers: Mapping[str, int]
    background: bool

    def __call__(self, own: ProcessState) -> None:
        """Write this worker's tensors and optimizer state by their names in the checkpoint."""
        known = {id(own.tensors[number]): name for number, name in self.parameters.items()}
        states = {
            label: {known.get(id(k), k): v for k, v in own.optimizers[number].state.items()}
            for label, number in self.optimizers.items()
        }
        tensors = {name: own.tensors[number] for name, number in self.tensors.items()}
        self.part.save(tensors, states, self.background)


def follow_script(
    own: ProcessState,
    settings: TorchSettings | None,
    training: Sequence[bool] | None,
    attributes: AttributeChanges,
) -> None:
    """Have a worker's modules as the script's are, before a pass.

    Args:
        own: what the worker has.
        settings: of torch, if they have changed.
        training: for every module whether it is in training mode, if that has changed.
        attributes: those that have changed.
    """
    if settings is not None:
        settings.apply()
    if training is not None:
        for module, mode in zip(own.modules, training, strict=True):
            module.training = mode
    follow(own.modules, attributes)
    own.memory.note(attributes)


class GivenValues:
    """The values that a script gives to a pass, of which another process has copies.

    Args:
        order: the pass, with its loss.
    """

    def __init__(self, order: Order) -> None:
        self._values: dict[str, object] = {"inputs": order.values}
        if order.loss is not None:
            self._values |= {"targets": order.loss.targets, "loss_kwargs": order.loss.more}
        self._before = {name: versions(values) for name, values in self._values.items()}

    def written(self) -> tuple[str, ...]:
        """Those of `"inputs"`, `"targets"` and `"loss_kwargs"` that were changed in place since."""
        now = {name: versions(values) for name, values in self._values.items()}
        return tuple(name for name, before in self._before.items() if now[name] != before)


@contextmanager
def leaving_no_trace(own: Iterable[nn.Module], assembly: Assembly, silent: bool) -> Iterator[None]:
    """Around a pass that leaves nothing in modules, whatever its stages run.

    Args:
        own: the modules of the process.
        assembly: its stages.
        silent: whether users' hooks are not called.
    """
    spans = [s for stage in assembly.stages.values() for way in stage.ways for s in way]
    modules = dict.fromkeys([*own, *modules_of(spans)])
    buffers = {id(b): b for module in modules for b in module.buffers(recurse=False)}
    with silenced(modules) if silent else nullcontext(), kept(modules, buffers.values()):
        yield
