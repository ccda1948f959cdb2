"""The tensors of the model that every worker's stages use, and who updates and saves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from penstock.engine.state import Backup
from penstock.errors import InputError
from penstock.workers.ways import NewWay


class Ownership:
    """The tensors that every worker's stages use, which are the same in every replica.

    Args:
        placement: for every stage the place of its worker in the replica.
        replicas: how many there are.
        devices: of all workers, replica after replica, if replicas may be on different devices; a
            worker then owns only tensors on its own device. Empty if this does not matter.

    Attributes:
        parameters: for every place in a replica, those that the worker's stages use.
        buffers: for every place in a replica, those that the worker's stages use.
        changing: for every place in a replica, the buffers that a forward changes.
        ways: how many were added.
        apart: the parameters, by id, outside of the graph that ends in the loss: those of all
            spans but the last one of the last stage, and of that one as well if it is recomputed.
    """

    def __init__(
        self, placement: Sequence[int], replicas: int = 1, devices: Sequence[torch.device] = ()
    ) -> None:
        workers = range(1 + max(placement))
        self._replicas = replicas
        self._devices = devices
        self._placement = placement
        self.parameters: list[list[nn.Parameter]] = [[] for _ in workers]
        self.buffers: list[list[torch.Tensor]] = [[] for _ in workers]
        self.changing: list[list[torch.Tensor]] = [[] for _ in workers]
        self.apart: dict[int, nn.Parameter] = {}
        self.ways = 0

    def add(self, way: NewWay) -> None:
        """Note what one more way uses."""
        self.ways += 1
        for index, stage in way.stages.items():
            worker = self._placement[index]
            for span in stage.spans:
                _extend(self.changing[worker], span.changing)
                if isinstance(span.module, nn.Module):
                    _extend(self.parameters[worker], span.module.parameters())
                    is_end = index == len(self._placement) - 1 and span is stage.spans[-1]
                    if not is_end or span.recompute:
                        self.apart |= {id(p): p for p in span.module.parameters()}
                    _extend(self.buffers[worker], span.module.buffers())

    def used_elsewhere(self, place: int) -> list[torch.Tensor]:
        """The tensors that only stages of workers at other places use."""
        every = list(zip(self.parameters, self.buffers, strict=True))
        own = {id(tensor) for tensor in chain(*every[place])}
        others = chain.from_iterable(chain(*used) for used in every)
        return [tensor for tensor in others if id(tensor) not in own]

    def everything(self) -> list[nn.Parameter]:
        """The parameters of all workers, each once."""
        every = (parameter for parameters in self.parameters for parameter in parameters)
        return list({id(parameter): parameter for parameter in every}.values())

    def owned(self) -> list[list[torch.Tensor]]:
        """For every worker, replica after replica, the tensors that it updates and saves.

        Each tensor is in one list. If several stages use it, it belongs to the first of them. The
        workers at the same place of all replicas divide their tensors, by bytes.
        """
        count = len(self.parameters)
        found: list[list[torch.Tensor]] = [[] for _ in range(self._replicas * count)]
        seen: set[int] = set()
        for place, tensors in enumerate(zip(self.parameters, self.buffers, strict=True)):
            same = range(place, len(found), count)
            held = {
                k: 0 for k in same if not self._devices or self._devices[k] == self._devices[place]
            }
            for tensor in chain.from_iterable(tensors):
                if id(tensor) not in seen:
                    owner = min(held, key=held.__getitem__)
                    held[owner] += tensor.nbytes
                    found[owner].append(tensor)
                    seen.add(id(tensor))
        return found

    def own(
        self, worker: int, wanted: Sequence[nn.Parameter] | None
    ) -> Sequence[nn.Parameter] | None:
        """The wanted parameters that this worker has; `None` (all of them) stays `None`."""
        if wanted is None:
            return None
        chosen = set(map(id, wanted))
        return [parameter for parameter in self.parameters[worker] if id(parameter) in chosen]

    def backup(self, worker: int, backward: bool) -> Backup:
        """What a pass of this worker may change, as it is now."""
        return Backup(self.parameters[worker] if backward else (), self.changing[worker])


T = TypeVar("T", bound=torch.Tensor)


def _extend(tensors: list[T], more: Iterable[T]) -> None:
    """Add those that are not there yet."""
    known = {id(tensor) for tensor in tensors}
    tensors += [tensor for tensor in more if id(tensor) not in known]


def conflict(tensor: torch.Tensor, one: int, other: int) -> InputError:
    """The error for a tensor that two workers use, each of which has memory of its own."""
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return InputError(
        f"a {kind} of shape {tuple(tensor.shape)} is used by workers {one} and {other}, on "
        'different ways through the model; only workers="threads" can share it'
    )
