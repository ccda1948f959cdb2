"""The results of operators on the `meta` device, which run once for the same shapes.

Torch works out the shapes of many results in Python, step by step. That may take longer than to
compute small results, and a model has the same operators for the same shapes in all its layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.capture.attributes import memory_of


class KnownShapes:
    """Runs operators on `meta`, or gives what they have given for the same arguments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Results | None] = {}

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the operator gives for these arguments, which are as the dispatcher passes them."""
        tensors = _tensors_in((*args, *kwargs.values()))
        if not tensors or not all(map(_is_bare, tensors)) or not _gives_new(operator):
            return operator(*args, **kwargs)
        key = operator, torch.get_default_dtype(), _hashable(args), _hashable(tuple(kwargs.items()))
        known = self._known.get(key)
        if known is not None:
            return known.made()
        result = operator(*args, **kwargs)
        self._known[key] = _described(result, tensors)
        return result


class _Results(NamedTuple):
    """What an operator gives.

    Attributes:
        tensors: the shape, strides and dtype of each.
        is_one: whether it is one tensor, and not a tuple of some.
    """

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    is_one: bool

    def made(self) -> Any:
        """New tensors on `meta` of these shapes, strides and dtypes: one, or a tuple of them."""
        made = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for shape, strides, dtype in self.tensors
        )
        return made[0] if self.is_one else made


def _described(result: Any, given: Sequence[Tensor]) -> _Results | None:
    """A description of an operator's result; `None` if it is more than new, ordinary tensors."""
    tensors = result if type(result) is tuple else (result,)
    if not all(isinstance(tensor, Tensor) and _is_bare(tensor) for tensor in tensors):
        return None
    memories = {memory_of(tensor) for tensor in tensors}
    if len(memories) < len(tensors) or not memories.isdisjoint(map(memory_of, given)):
        return None
    shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    return _Results(shapes, is_one=result is tensors[0])


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments, in lists as well."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found


def _is_bare(tensor: Tensor) -> bool:
    """Whether sizes, strides and a dtype are all that there is to a tensor."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_meta:
        return False
    marked = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.layout is torch.strided and not marked


@cache
def _gives_new(operator: Any) -> bool:
    """Whether an operator is torch's own, and neither writes what it is given nor gives views."""
    schema = operator._schema
    aliases = (each.alias_info for each in (*schema.arguments, *schema.returns))
    return operator.namespace == "aten" and all(alias is None for alias in aliases)


def _hashable(value: Any) -> Hashable:
    """An argument as a key: of a tensor its dtype, shape and strides, else type and value."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return type(value), value
