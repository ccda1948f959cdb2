"""What a model returns in objects that closed modules have made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.capture.equality import same_constant
from penstock.capture.trees import flatten_result
from penstock.errors import InputError


def tensors_in(value: object, others: Sequence[object]) -> tuple[torch.Tensor, ...]:
    """The tensors that an object holds, in the order in which `flatten_result` finds them.

    Args:
        value: the object.
        others: what it holds besides.

    Raises:
        InputError: it holds something else besides.
    """
    leaves = flatten_result(value)[0]
    now = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    pairs = [(a, b) for a, b in zip(others, now, strict=False) if not same_constant(a, b)]
    if pairs or len(now) != len(others):
        what = "{!r} instead of {!r}".format(*pairs[0][::-1]) if pairs else "more, or less"
        raise InputError(
            f"a {type(value).__name__} in the model's result holds {what}: data that depend on "
            "values, not only on sizes, and that the model's Python puts into an object. Return "
            'them as a tensor, or keep the model whole with keep_closed=[""]'
        )
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
