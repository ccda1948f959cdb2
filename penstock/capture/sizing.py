"""Whether the sizes of the results of recorded calls depend on shapes alone, or on values."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any

import torch

from penstock.capture.calls import (
    Call,
    Origin,
    Ref,
    TensorInfo,
    Trace,
    Unrecordable,
    Value,
    function_name,
)
from penstock.capture.closed_functions import ClosedFunction
from penstock.capture.trees import flatten

_KEEPING = frozenset(
    """
    masked_fill masked_fill_ masked_scatter masked_scatter_ where scatter scatter_ scatter_add
    scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_copy index_copy_
    index_fill index_fill_ index_put index_put_ __setitem__ add add_ sub sub_ mul mul_ div div_
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
    __rtruediv__ __itruediv__ __and__ __or__ logical_and logical_or
    scaled_dot_product_attention
    """.split()
)
"""Functions whose result is as large as the largest that they are given, or as the first."""

_OF_SPARSE = frozenset(
    "indices _indices values _values crow_indices col_indices ccol_indices row_indices".split()
)
"""Functions that give as many entries as a sparse tensor has."""

_DIM_PLACE = {
    "size": (1, None),
    "__len__": (1, 0),
    "unbind": (1, 0),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), (2, 0)),
    **dict.fromkeys(("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"), (2, 0)),
}
"""By function, the position of the argument that is the dimension, and its default."""


class Sizing(IntEnum):
    """What the sizes of a call's results depend on."""

    SHAPES = 0
    """On the shapes of what it is given."""
    PERHAPS = 1
    """It looks at values, and so far they made no difference."""
    VALUES = 2
    """On values."""


class Sizings:
    """Which values of a recording have sizes that depend on other values, or may.

    If Python reads a size that depends on values, it cannot be recorded. If it reads one that may,
    this is noted, so that the program compares the size when it runs.

    Args:
        trace: the recording, as far as it has come.
        sized: the closed modules, by qualified name, and the other calls, by identity, that give
            results whose sizes depend on values.
    """

    def __init__(self, trace: Trace, sized: Collection[str | int]) -> None:
        self._trace = trace
        self._sized = sized
        self._perhaps: dict[Ref, bool] = {}  # whether on values of the inputs alone

    def of_call(self, call: Call, result: object, may_size: bool, weightless: bool) -> Sizing:
        """What sizes of a call's result depend on, as far as it looks at values.

        Args:
            call: the call, of which it is known whether it looks at values.
            result: what it gave.
            may_size: whether it looks at values from which sizes can come.
            weightless: whether the model has no weights.

        Raises:
            Unrecordable: a closed module looks at values, and gives booleans or floats beside
                tensors.
        """
        if isinstance(call.target, ClosedFunction) and call.looks:
            return Sizing.VALUES
        if weightless:
            return Sizing.VALUES if may_size or call.looks else Sizing.SHAPES
        perhaps = Sizing.PERHAPS if call.looks and call.target else Sizing.SHAPES
        if not call.is_module:
            return Sizing.VALUES if may_size or _by_values(call) else perhaps
        if call.target and call.looks and (odd := _numbers_beside_tensors(result)):
            raise Unrecordable(
                call.path,
                f"{call.label} looks at values, and gives {odd[0]!r} beside tensors, which may "
                "be another one for others",
            )
        call.may_size = may_size
        return Sizing.VALUES if call.target in self._sized else perhaps

    def of_leaf(self, leaf: object, call: Call, sizing: Sizing, origin: Origin) -> Sizing:
        """What the size of one leaf of a call's result depends on.

        If a call is given a tensor whose size depends on values, so does the size of its result. It
        only may if the call is one that keeps sizes, and another tensor that it is given has this
        shape.

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
        keeps = call.is_module or _name(call) in _KEEPING
        alike = any(info.shape == shape and not info.dynamic for info in tensors)
        return Sizing.PERHAPS if keeps and alike else Sizing.VALUES

    def note(self, call: Call, number: int, sizings: Sequence[Sizing]) -> None:
        """Note that sizes of the results of a call may depend on values.

        Args:
            call: the call.
            number: its place in the trace.
            sizings: for every leaf of its result what its size depends on.

        Raises:
            Unrecordable: their number of dimensions may as well, as a `squeeze` does not say which.
        """
        refs = [value for value in call.reads() if isinstance(value, Ref)]
        everywhere = _name(call) == "squeeze" and len(call.args) + len(call.kwargs) == 1
        if everywhere and any(map(self.is_dynamic, refs)):
            raise Unrecordable(call.path, "its Python squeezes what is as large as values say")
        found = [self._perhaps[ref] for ref in refs if ref in self._perhaps]
        infos = map(self._trace.info, refs)
        by_inputs = any(isinstance(i, TensorInfo) and i.origin is Origin.INPUTS for i in infos)
        gives_array = isinstance(call.target, ClosedFunction) and call.looks
        for leaf, sizing in enumerate(sizings):
            if sizing is Sizing.PERHAPS or gives_array or found:
                own = by_inputs and not found
                self._perhaps[Ref(number, leaf)] = any(found) or own
        call.by_inputs = call.looks and by_inputs

    def depends(self, value: Ref) -> bool:
        """Whether its size depends on values, or may."""
        return value in self._perhaps or self.is_dynamic(value)

    def may_depend(self, value: Ref) -> bool:
        """Whether what it is may depend on values, though so far they made no difference."""
        return value in self._perhaps

    def check_inspected(self, value: Ref, path: str, dims: Iterable[int]) -> None:
        """Raise if sizes of a value that Python reads depend on values; note it if they may.

        Args:
            value: the value.
            path: the open module whose Python reads them.
            dims: the dimensions.

        Raises:
            Unrecordable: the sizes depend on values.
        """
        if self.is_dynamic(value):
            raise Unrecordable(
                path, "its Python asks for the size of a tensor that depends on values"
            )
        self.note_inspected(value, path, dims)

    def note_inspected(self, value: Ref, path: str, dims: Iterable[int]) -> None:
        """Note that Python asks for something of a value that may depend on values.

        Args:
            value: the value.
            path: the open module whose Python does.
            dims: the dimensions, see `Call.inspected`.
        """
        call = self._trace.calls[value.call]
        call.inspected_in = path if call.inspected_in is None else call.inspected_in
        call.inspected.setdefault(value.leaf, set()).update(dims)
        call.by_inputs |= self._perhaps[value]

    def is_dynamic(self, value: Value) -> bool:
        """Whether the size of a value depends on values."""
        info = self._trace.info(value) if isinstance(value, Ref) else None
        return isinstance(info, TensorInfo) and info.dynamic


def _name(call: Call) -> str:
    """The name of the function that is called; empty for a module."""
    return "" if isinstance(call.target, str) else function_name(call.target)


def _by_values(call: Call) -> bool:
    """Whether sizes of a function's result depend on values, though no tag of torch says so."""
    name = _name(call)
    by_tensor = name == "tensor_split" and len(call.reads()) > 1
    return by_tensor or name in _OF_SPARSE


def dims_inspected(
    name: str, ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType
) -> list[int]:
    """The dimensions for whose sizes Python asks.

    Args:
        name: the name of the function that Python calls.
        ndim: the number of dimensions of the tensor.
        args: the function's positional arguments.
        kwargs: its keyword arguments.
        frame: the frame whose code calls it.
    """
    every = list(range(ndim))
    dim: Any = None
    if name in _DIM_PLACE:
        place, default = _DIM_PLACE[name]
        dim = kwargs.get("dim", args[place] if len(args) > place else default)
    elif name == "shape":
        dim = _item_after(frame)
    is_known = type(dim) is int and -ndim <= dim < ndim
    return [dim % ndim] if is_known else every


def _item_after(frame: FrameType) -> object:
    """The constant index with which the attribute that a frame reads is used at once, if any."""
    later = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    index, use = next(later, None), next(later, None)
    is_item = use is not None and (use.opname == "BINARY_SUBSCR" or use.argrepr == "[]")
    is_constant = index is not None and index.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    return index.argval if is_item and is_constant and index is not None else None


def _numbers_beside_tensors(result: object) -> list[object]:
    """The booleans and floats of a result that also has tensors; integers can be sizes."""
    leaves = flatten(result)[0]
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return [leaf for leaf in leaves if has_tensors and type(leaf) in (bool, float)]
