"""Values that stay on their worker between passes: the caches and states of sessions.

A *resident value* is made by one stage and read by the same stage in the next pass of a session, so
it never leaves the worker. The driver knows it by a number, and by its shape. What the script does
to such a value between two passes (choosing rows for a beam search, cutting off what is too much)
is noted as operators of ATen, and done by the worker when the value is next read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.capture.trees import map_leaves
from penstock.errors import StatesLost

GONE = (
    "a state of this session is gone: the worker that had it was replaced. Begin the session again"
)


class Shape(NamedTuple):
    """What the driver knows of a resident value.

    Attributes:
        size: of every dimension.
        stride: of every dimension.
        dtype: of its elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """The shape, strides and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Operand:
    """Stands for the resident value among the arguments of an `Operation`."""


class Operation(NamedTuple):
    """An operator that is applied to a resident value.

    Attributes:
        name: the qualified name of the operator, such as `aten::index_select`.
        overload: the name of its overload, such as `default`.
        args: its positional arguments; an `Operand` stands for the value itself.
        kwargs: its keyword arguments, with `Operand` in the same role.
    """

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def on(self, value: torch.Tensor) -> torch.Tensor:
        """Apply the operator to a value; returns its result, which may be a view."""
        namespace, name = self.name.split("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), self.overload)

        def placed(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return value
            return leaf.to(value.device) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = map_leaves(placed, (self.args, dict(self.kwargs)))
        result: torch.Tensor = operator(*args, **kwargs)
        return result


@dataclass(frozen=True)
class States:
    """The resident values of a micro-batch.

    Attributes:
        taken: for every leaf of the inputs that is a resident value, the number of the value.
        after: the operations to apply to some of these values before they are read, by leaf.
        first: where the numbers of kept values begin: leaf `k` of the result is kept under the
            number `first + k`.
        dropped: numbers of values that nobody needs any more.
    """

    taken: Mapping[int, int]
    after: Mapping[int, Sequence[Operation]] = field(default_factory=dict)
    first: int = 0
    dropped: Sequence[int] = ()


class Residents:
    """The resident values of one worker's stages.

    Attributes:
        shapes: of the values that the present pass has kept, by number.
    """

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}
        self.shapes: dict[int, Shape] = {}

    def take(self, leaf: int, states: States) -> torch.Tensor:
        """The value that this leaf of the inputs is.

        Raises:
            StatesLost: it is not here.
        """
        try:
            value = self._values[states.taken[leaf]]
        except KeyError:
            raise StatesLost(GONE) from None
        for operation in states.after.get(leaf, ()):
            value = operation.on(value)
        return value

    def keep(self, leaf: int, value: torch.Tensor, states: States) -> None:
        """Keep a value that this leaf of the result is."""
        number = states.first + leaf
        self._values[number] = value
        self.shapes[number] = Shape.of(value)

    def drop(self, numbers: Sequence[int]) -> None:
        """Let go of these values, if they are here."""
        for number in numbers:
            self._values.pop(number, None)

    def fetch(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Those of these values that are here."""
        return {n: self._values[n] for n in numbers if n in self._values}
