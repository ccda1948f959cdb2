"""What travels between the script and its actors: bytes, and one array with all tensors.

Ray keeps an array beside its pickle, so that actors of one node read it in the same shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.links.pickling import packed_together, unpack


class Pickled(NamedTuple):
    """An object on its way.

    Attributes:
        data: the object, pickled without its tensors.
        layout: where each of these is.
        content: all of them; nobody may write to it where it has arrived.
    """

    data: bytes
    layout: Sequence[Any]
    content: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        """The size of what travels, without the layout: it is small."""
        return len(self.data) + self.content.nbytes


def pickled(obj: Any) -> Pickled:
    """An object, pickled.

    Functions and classes of the user's script or notebook travel by value.
    """
    data, layout, base = packed_together(obj)
    return Pickled(data, layout, base.numpy())


def unpickled(packed: Pickled) -> Any:
    """The object; its tensors are on the CPU, in memory of their own."""
    base = torch.empty(packed.content.nbytes, dtype=torch.uint8)  # aligned
    memory = base.numpy()
    memory[:] = packed.content
    tensors = [p.alone(memory.data).requires_grad_(p.requires_grad) for p in packed.layout]
    return unpack(packed.data, tensors)
