"""Whether two values are the same, bit for bit: tensors, plain data, containers and objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.capture.trees import flatten

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same shape, dtype and bits, or a NaN in the same places.

    One NaN is like any other. On `meta` there are no values, so only shapes and dtypes count.
    """
    if one is other:
        return True
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.is_meta or other.is_meta:
        return True
    if one.is_nested:
        pairs = zip(one.unbind(), other.unbind(), strict=True)
        return all(same_tensor(a, b) for a, b in pairs)
    with torch.no_grad():
        return _same_values(_dense(one), _dense(other).to(one.device))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    plain = plain.resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = _BITS[one.itemsize]
    mine, theirs = one.view(bits), other.view(bits)
    if torch.equal(mine, theirs):
        return True
    return bool(((mine == theirs) | (_is_nan(one) & _is_nan(other))).all())


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.itemsize > 1 else tensor.float()).isnan()  # float8 has no isnan


def has_nan(value: object) -> bool:
    """Whether a value is NaN, or a tensor that has a NaN among its elements."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (float, complex)) and value != value
    if value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return False
    parts = value.unbind() if value.is_nested else [value]
    with torch.no_grad():
        return any(bool(_is_nan(_dense(part)).any()) for part in parts)


def same_constant(one: Any, other: Any) -> bool:
    """Whether two values that are no tensors are equal, or both NaN.

    An object whose type does not define equality is equal only to itself.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return _same_array(one, other)
    if isinstance(one, (float, complex)) and one != one and other != other:
        return True
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # the comparison gives no boolean
        return False


def _same_array(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.hasobject:
        return all(map(same_constant, one.flat, other.flat))
    if isinstance(one, np.ma.MaskedArray):
        return _same_array(one.data, other.data) and np.array_equal(one.mask, other.mask)
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def same(one: object, other: object) -> bool:
    """Whether two results are the same: in structure, in type, and in everything they hold.

    Objects whose type does not define equality are the same if their attributes are.
    """
    return _Sameness().holds(one, other)


class _Sameness:
    """One comparison; it remembers what it is comparing, for values that hold themselves."""

    def __init__(self) -> None:
        self._compared: dict[tuple[int, int], tuple[Any, Any]] = {}

    def holds(self, one: Any, other: Any) -> bool:
        if one is other or (id(one), id(other)) in self._compared:
            return True
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return same_tensor(one, other)
        if type(one) is not type(other):
            return False
        self._compared[id(one), id(other)] = one, other
        mine, structure = flatten(one)
        if structure is not None:
            theirs, others = flatten(other)
            return structure == others and all(map(self.holds, mine, theirs))
        if isinstance(one, Mapping):
            return list(one) == list(other) and all(self.holds(one[k], other[k]) for k in one)
        return same_constant(one, other) or self._alike_inside(one, other)

    def _alike_inside(self, one: object, other: object) -> bool:
        says = any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1])
        if says or callable(one) or not hasattr(one, "__dict__"):
            return False
        return self.holds(vars(one), vars(other))
