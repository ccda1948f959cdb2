"""Work that is lost with the workers which did it, and is done again by those who take over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.orders import Order


@dataclass(frozen=True)
class Work:
    """A pass, a step of an optimizer, or something else that workers have done.

    Attributes:
        redo: does it again in the same way, with the workers that it is called with.
        order: the pass, without its inputs; `None` if it is not a pass.
        nbytes: bytes of memory that are kept for it.
    """

    redo: Callable[[Any], None]
    order: Order | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class LostWork:
    """What was done since the moment that `Workers.remembered` goes back to.

    Attributes:
        works: in the order in which they were done.
        rewound: while open, the script's model is as it was at that moment; afterwards it is again
            what the script has made of it.
        current: the tensors of the model of which the script had the workers' current values.
    """

    works: Sequence[Work] = ()
    rewound: Callable[[], AbstractContextManager[None]] = nullcontext
    current: Sequence[torch.Tensor] = ()
