"""The memory that autograd holds between a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import saved_tensors_hooks


class Saved:
    """While open, notes the memory that forwards save for their backwards.

    What is saved as a view counts with all of the memory that it keeps, and memory counts once.
    All of it stays alive meanwhile, so that no address stands for two things.

    Args:
        own: the model's tensors, which are there anyway.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._seen = {address(tensor) for tensor in own if not tensor.is_meta}
        self._new: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(*_)
        self._alive.clear()

    def take(self) -> dict[int, int]:
        """What was saved for the first time since this was last asked: bytes, by address."""
        new, self._new = self._new, {}
        return new

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        bare = tensor.detach()  # with its history, a saved result would hold itself for ever
        place = address(bare)
        if place and place not in self._seen:
            self._seen.add(place)
            self._new[place] = bare.untyped_storage().nbytes()
            self._alive.append(bare)
        return bare


def address(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor is a view of; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage
        return 0
