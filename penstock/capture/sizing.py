"""What it depends on how large the results of recorded calls are: on shapes, or on values."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

import torch

from penstock.capture.calls import Call, Origin, Ref, TensorInfo, Trace, Unrecordable, Value
from penstock.capture.closed_functions import ClosedFunction
from penstock.capture.trees import flatten


class Sizing(IntEnum):
    """What it depends on how large the results of a call are."""

    SHAPES = 0
    """On the shapes of what it is given."""
    PERHAPS = 1
    """It looks at values, and so far they made no difference."""
    VALUES = 2
    """On values."""


class Sizings:
    """Which values of a recording may be as large as other values say.

    Where Python asks for the size of one that is, that cannot be recorded. Of one that may be, it
    is noted, so that a program compares it when it runs.

    Args:
        trace: the recording, as far as it has come.
        sized: closed modules whose results are as large as values say, and the identities of other
            calls of which that is true.
    """

    def __init__(self, trace: Trace, sized: Collection[str | int]) -> None:
        self._trace = trace
        self._sized = sized
        self._perhaps: dict[int, bool] = {}  # calls; whether it may be by the inputs' values alone

    def of_call(self, call: Call, result: object, may_size: bool, weightless: bool) -> Sizing:
        """What the sizes of its result depend on, as far as it looks at values.

        Args:
            call: the call, of which it is known whether its Python does.
            result: what it gave.
            may_size: whether it looks at values from which sizes can come.
            weightless: whether there are no weights.

        Raises:
            Unrecordable: its Python does, and it gives numbers.
        """
        if isinstance(call.target, ClosedFunction) and call.looks:
            return Sizing.VALUES
        if weightless:
            return Sizing.VALUES if may_size or call.looks else Sizing.SHAPES
        perhaps = Sizing.PERHAPS if call.looks and call.target else Sizing.SHAPES
        if not call.is_module:
            return Sizing.VALUES if may_size else perhaps
        if call.target and call.looks and (odd := _numbers_beside_tensors(result)):
            raise Unrecordable(
                call.path,
                f"{call.label} looks at values, and gives {odd[0]!r} beside tensors, which may "
                "be another one for others",
            )
        call.may_size = may_size
        return Sizing.VALUES if call.target in self._sized else perhaps

    def of_leaf(self, leaf: object, call: Call, sizing: Sizing, origin: Origin) -> Sizing:
        """The same of one leaf of a result.

        Where a call is given anything whose size depends on values, so does that of its result,
        unless it is just as large as something else that it is given.

        Args:
            leaf: the leaf.
            call: the call.
            sizing: what was found for the call.
            origin: what its results are made of.
        """
        if call.identity in self._sized:
            return Sizing.VALUES
        if sizing is Sizing.VALUES:
            return sizing if origin is not Origin.NOTHING else Sizing.SHAPES
        given = [self._trace.info(value) for value in call.reads() if isinstance(value, Ref)]
        tensors = [info for info in given if isinstance(info, TensorInfo)]
        if not any(info.dynamic for info in tensors) or not isinstance(leaf, torch.Tensor):
            return sizing
        shape = tuple(leaf.shape)
        alike = any(info.shape == shape and not info.dynamic for info in tensors)
        return Sizing.PERHAPS if alike else Sizing.VALUES

    def note(self, call: Call, number: int, sizing: Sizing) -> None:
        """Note whether the results of a call may be as large as values say.

        Args:
            call: the call.
            number: its place in the trace.
            sizing: what the largest of its results depend on.
        """
        refs = [value for value in call.reads() if isinstance(value, Ref)]
        found = [self._perhaps[ref.call] for ref in refs if ref.call in self._perhaps]
        if sizing is Sizing.PERHAPS:
            infos = map(self._trace.info, refs)
            found.append(
                any(isinstance(i, TensorInfo) and i.origin is Origin.INPUTS for i in infos)
            )
        if found:
            self._perhaps[number] = any(found)
            call.by_inputs = call.looks and any(found)

    def check_asked(self, value: Ref, path: str) -> None:
        """Python asks for the size of a value.

        Args:
            value: the value.
            path: the open module whose Python does.

        Raises:
            Unrecordable: that depends on values.
        """
        if self.is_dynamic(value):
            raise Unrecordable(
                path, "its Python asks for the size of a tensor that depends on values"
            )
        if value.call in self._perhaps:
            call = self._trace.calls[value.call]
            call.asked_in = path if call.asked_in is None else call.asked_in
            call.by_inputs = self._perhaps[value.call]

    def is_dynamic(self, value: Value) -> bool:
        """Whether the size of a value depends on values."""
        info = self._trace.info(value) if isinstance(value, Ref) else None
        return isinstance(info, TensorInfo) and info.dynamic


def _numbers_beside_tensors(result: object) -> list[object]:
    """Those of a result that has tensors as well; integers can be sizes."""
    leaves = flatten(result)[0]
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return [leaf for leaf in leaves if has_tensors and type(leaf) in (bool, float)]
