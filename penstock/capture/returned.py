"""What a model returns in objects that were made in its forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.capture.calls import INPUTS, Ref, Trace
from penstock.capture.equality import same_constant
from penstock.capture.interception import is_plain
from penstock.capture.known import Known
from penstock.capture.objects import Objects
from penstock.capture.trees import flatten_result, parts_of
from penstock.errors import InputError


def tensors_in(value: object, others: Sequence[object]) -> tuple[torch.Tensor, ...]:
    """The tensors that an object holds, in the order in which `flatten_result` finds them.

    Args:
        value: the object.
        others: the other leaves that it held when it was recorded.

    Raises:
        InputError: its other leaves are not these.
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


class MadeHere:
    """Which objects in a model's result were made in this forward, so that they can be opened.

    Args:
        model: the model.
        trace: the recording, whose calls are complete.
        known: the names of the objects that calls have given.
    """

    def __init__(self, model: nn.Module, trace: Trace, known: Known) -> None:
        self._model, self._trace, self._known = model, trace, known

    def opens(self, value: object) -> bool:
        """Whether a value is an object with tensors that the Python of open modules has made.

        An object that a module keeps is not opened: it has to stay the same, and so has what it
        holds.
        """
        return self._known.get(value) is None and self._was_made(value)

    def is_only_returned(self, value: object, leaves: Sequence[object]) -> bool:
        """Whether a value is an object with tensors, made by a call and once in the result.

        Its tensors are taken out at the end. Where the model is one call, nothing is gained by it.

        Args:
            value: the value.
            leaves: the leaves of the result.
        """
        if isinstance(value, torch.Tensor) or is_plain(value):
            return False
        known, count = self._known.get(value), sum(leaf is value for leaf in leaves)
        is_part = (
            isinstance(known, Ref)
            and known.call != INPUTS
            and self._trace.calls[known.call].target != ""
        )
        return count == 1 and is_part and self._was_made(value)

    def _was_made(self, value: object) -> bool:
        parts = parts_of(value)
        kept = Objects(self._model.modules()).roots if parts else {}
        others = (part for part in parts if not isinstance(part, torch.Tensor))
        return bool(parts) and not any(id(part) in kept for part in others)
