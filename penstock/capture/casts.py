"""Which weights the autocast regions of a model's own cast while its forward is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Casts:
    """The weights that were cast since autocast's cache was cleared, as at the end of a region."""

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._most = 0

    def note(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is cast; it matters if autocast would keep the result for it."""
        if tensor.requires_grad and tensor.is_leaf:
            self._most = max(self._most, 2 if id(tensor) in self._weights else 1)
            self._weights.add(id(tensor))

    def clear(self) -> None:
        """Note that autocast forgets what it has cast."""
        self._weights.clear()

    def note_unseen(self) -> None:
        """Note that weights may be cast any number of times where nobody sees it."""
        self._most = 2

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, autocast keeps no results, so that every use of a weight casts it."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    def found(self) -> int:
        """How often a weight was cast in a region since the last question: 0, 1, or 2 for more."""
        most, self._most = self._most, 0
        return most
