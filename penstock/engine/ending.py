"""How what the last stage gives is put together to what the model returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.capture.calls import ROWS, Join, Sizes
from penstock.capture.lowering import assembled
from penstock.engine.microbatch import pieces_of
from penstock.links.link import Values


@dataclass(frozen=True)
class Ending:
    """How the last stage's values are put together to the model's result.

    Attributes:
        values: what they are, in order.
        outputs: the leaves of the result: values, sizes and constants.
        structure: what the leaves are put into.
        joins: for every value how it is put together from micro-batches.
    """

    values: tuple[Any, ...]
    outputs: Sequence[Any]
    structure: Any
    joins: Sequence[Join] = ()

    def result(self, values: Sequence[Any], sizes: Sizes) -> Any:
        """The model's result, in its own structure, of the last stage's values."""
        by_value = dict(zip(self.values, values, strict=True))
        return assembled(self.outputs, self.structure, by_value, sizes)


class Endings:
    """The endings of all ways through the model, and which one each micro-batch takes.

    Attributes:
        ways: by number.
        taken: for every micro-batch of the pass its sizes, and the number of its way.
    """

    def __init__(self) -> None:
        self.ways: list[Ending] = []
        self.taken: Sequence[tuple[Sizes, int]] = ()

    def result(self, microbatch: int, values: Values) -> Any:
        """A micro-batch's result in the model's structure, of the last stage's values."""
        sizes, way = self.taken[microbatch]
        return self.ways[way].result(values, sizes)

    def pieces(self, microbatch: int, values: Values, rows: Sequence[int]) -> list[Any]:
        """The results of pieces of a micro-batch that have so many rows each.

        They are copies, without history; `None` stands for what cannot be told apart.
        """
        sizes, way = self.taken[microbatch]
        ending = self.ways[way]
        known = [None if j.why else value for value, j in zip(values, ending.joins, strict=True)]
        dims = [None if join.why else join.dim for join in ending.joins]
        parts = pieces_of(known, dims, rows)
        return [
            ending.result(part, {**sizes, ROWS: n}) for part, n in zip(parts, rows, strict=True)
        ]
