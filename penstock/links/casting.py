"""A link whose values travel in half precision: the sender rounds them, the receiver casts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.links.link import Gradients, Roots, Values, edges


class Cast:
    """A link whose values travel rounded to `dtype`, if they are wider, and are cast back there.

    Gradients travel back in the same way. The link has fewer bytes to carry, half for float32, and
    the stages compute in the precision that they would have without it.

    Args:
        link: the sink of the earlier stage, or the source of the later one, or both.
        dtype: in which floating point values travel.
    """

    def __init__(self, link: Any, dtype: torch.dtype) -> None:
        self._link = link
        self._dtype = dtype

    def send(self, microbatch: int, results: Values) -> Roots:
        """Hand over a micro-batch's values."""
        self._link.send(microbatch, cast_down(results, self._dtype))
        return edges(results)

    def receive(self, microbatch: int) -> Values:
        """The next micro-batch's values; waits for them."""
        return cast_back(self._link.receive(microbatch))

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Hand back the gradients of a micro-batch's values."""
        self._link.send_gradients(microbatch, cast_down(gradients, self._dtype))

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The next micro-batch's gradients; waits for them."""
        return cast_back(self._link.receive_gradients(microbatch))


def cast_down(values: Sequence[Any], dtype: torch.dtype) -> Values:
    """The values as they travel, then a mark for each: an empty tensor of its original dtype.

    The mark is `None` for a value that is not cast. The receiver cannot know the dtype otherwise:
    under autocast, the same value may come in different dtypes.
    """
    wide = [
        isinstance(v, torch.Tensor) and v.is_floating_point() and v.dtype.itemsize > dtype.itemsize
        for v in values
    ]
    travelling = [_cast(v, dtype) if w else v for v, w in zip(values, wide, strict=True)]
    return (
        *travelling,
        *(v.new_empty(0) if w else None for v, w in zip(values, wide, strict=True)),
    )


def cast_back(values: Sequence[Any]) -> Values:
    """What `cast_down` was given, rounded."""
    half = len(values) // 2
    pairs = zip(values[:half], values[half:], strict=True)
    return tuple(v if mark is None else _cast(v, mark.dtype) for v, mark in pairs)


def name_of(dtype: Any) -> str | None:
    """What a plan calls a dtype."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def in_words(links: Sequence[str], dtype: str | None) -> tuple[str, ...]:
    """The links as a pipeline reports them."""
    return tuple(f"{link}, in {dtype}" if dtype else link for link in links)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Without history, but still asking for a gradient if it did."""
    return value.detach().to(dtype).requires_grad_(value.requires_grad)
