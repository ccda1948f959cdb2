"""The model's tensors as workers in other processes are given them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from penstock.links.segment import TensorPlace

_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")  # dictionaries, or None


@dataclass(frozen=True)
class Shared:
    """A tensor that a worker is given.

    Attributes:
        number: by which both sides know it.
        place: where it is, in the segment that comes with it.
        is_parameter: whether it is a parameter.
        attributes: those that the user has set on it.
        hooks: of its gradient: those that see it, and those that are called once it is added up.
        shared: itself, if it is on a device other than the CPU, see `DeviceKind.shared`.
    """

    number: int
    place: TensorPlace
    is_parameter: bool
    attributes: dict[str, Any]
    hooks: tuple[Sequence[Any], Sequence[Any]]
    shared: Any = None

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The worker's own tensor for this memory."""
        if not self.is_parameter:
            return memory.requires_grad_(self.place.requires_grad)
        parameter = nn.Parameter(memory, self.place.requires_grad)
        parameter.__dict__.update(self.attributes)
        for hook in self.hooks[0]:
            parameter.register_hook(hook)
        for hook in self.hooks[1]:
            parameter.register_post_accumulate_grad_hook(hook)
        return parameter


def described(number: int, tensor: torch.Tensor, place: TensorPlace) -> Shared:
    """A tensor for a worker, under this number, at this place."""
    is_parameter = isinstance(tensor, nn.Parameter)
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    seen, added = (list(found.values()) if found else [] for found in hooks)
    return Shared(number, place, is_parameter, dict(tensor.__dict__), (seen, added))


def hooks_of_tensors(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The identifiers of the hooks on these tensors' gradients; torch never uses one twice."""
    registries = chain.from_iterable(map(_HOOKS, tensors))
    return list(chain.from_iterable(filter(None, registries)))
