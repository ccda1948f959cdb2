"""Calls whose Python looks at values, and may do something else for other ones.

What they did when they were recorded is what the Python around them went by. So each is compared
with it when it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capture.calls import Same
from penstock.capture.equality import same_constant
from penstock.capture.trees import Structure, flatten, map_leaves, tree_leaves
from penstock.capture.watching import version_of
from penstock.errors import InputError

Expected = tuple[Any, ...] | None
"""What a leaf of a result is: `("data", it)` or `("tensor", sizes, dtype, layout, kind, gradient)`.

If it is `None`, it may be any object. Of the sizes, and of whether a gradient is required, what
nobody has asked for is `None`; the kind is its class.
"""


@dataclass(frozen=True)
class Recorded:
    """What is known of a call's result.

    Attributes:
        label: of the call.
        path: the module that makes it.
        asker: the module whose Python has asked for sizes of its result; `None` if none has.
        structure: of the result.
        written: the leaves of `(args, kwargs)` that it changed in place.
        same: see `Call.same`.
    """

    label: str
    path: str
    asker: str | None
    structure: Structure | None
    written: frozenset[int]
    same: Same | None


def looking(
    recorded: Recorded,
    expected: Sequence[Expected],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function, or a module, that looks at values.

    Args:
        recorded: what is known of its result.
        expected: the same of the leaves.
        function: what is called.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        InputError: it gives something else, or changes something else in place.
    """
    given, structure = flatten((args, kwargs))
    tensors = [(k, leaf) for k, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)]
    before = [version_of(leaf) for _, leaf in tensors]
    result = function(*args, **kwargs)
    for (k, leaf), version in zip(tensors, before, strict=True):
        if version_of(leaf) != version and k not in recorded.written:
            raise InputError(_decided(recorded, "changes what it is given, and did not"))
    if not holds_still(given, structure, (args, kwargs)):
        raise InputError(_decided(recorded, "changes a container that it is given, and did not"))
    if recorded.same is not None and same_as(result, given) != recorded.same:
        raise InputError(_decided(recorded, "gives one of its arguments, or none, unlike"))
    return as_recorded(recorded, expected, result)


def same_as(result: Any, given: Sequence[Any]) -> Same:
    """Which leaves of the arguments, or earlier ones of the result, the tensors in a result are.

    And whether they are views of others.

    Args:
        result: of a call.
        given: the leaves of its arguments.
    """
    places = {id(leaf): k for k, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    found = []
    for k, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, torch.Tensor):
            found.append((places.get(id(leaf)), leaf._is_view()))
            places.setdefault(id(leaf), len(given) + k)
    return tuple(found)


def apart(result: Any, given: Sequence[Any], written: Collection[int]) -> Any:
    """A result whose tensors are objects of their own, each of them once.

    One that is an argument, or there twice, may be another one for other values: under one name
    they could not be told apart.

    Args:
        result: of a call.
        given: the leaves of its arguments.
        written: the ids of those that it has changed in place, which it may give.
    """
    taken = {id(leaf) for leaf in given if isinstance(leaf, torch.Tensor)}.difference(written)

    def own(leaf: Any) -> Any:
        plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if not plain or isinstance(leaf, nn.Parameter):
            return leaf
        if id(leaf) not in taken:
            taken.add(id(leaf))
            return leaf
        other = torch.ops.aten.alias.default(leaf)
        vars(other).update(vars(leaf))
        return other

    return map_leaves(own, result)


def holds_still(leaves: Sequence[Any], structure: Structure | None, tree: object) -> bool:
    """Whether a container still holds just the objects that it held, in this structure."""
    now, other = flatten(tree)
    return structure == other and all(map(operator.is_, leaves, now))


def as_recorded(recorded: Recorded, expected: Sequence[Expected], result: Any) -> Any:
    """A result, if it is what the Python around the call may go by.

    Args:
        recorded: what is known of it.
        expected: the same of its leaves.
        result: of the call.

    Raises:
        InputError: it is another one.
    """
    leaves, structure = flatten(result)
    if structure != recorded.structure:
        raise InputError(_decided(recorded, "gives another structure than"))
    for leaf, wanted in zip(leaves, expected, strict=True):
        if wanted is not None and (how := _differs(leaf, wanted)):
            raise InputError(_decided(recorded, how))
    return result


def _differs(leaf: Any, wanted: tuple[Any, ...]) -> str:
    """How a leaf differs from what was recorded; empty if it does not."""
    is_tensor = isinstance(leaf, torch.Tensor)
    if wanted[0] == "data":
        now = "a tensor" if is_tensor else repr(leaf)
        same = not is_tensor and same_constant(leaf, wanted[1])
        return "" if same else f"gives {now}, and not {wanted[1]!r} as"
    if not is_tensor:
        return f"gives {leaf!r}, and not a tensor as"
    _, sizes, dtype, layout, kind, gradient = wanted
    if (leaf.dtype, leaf.layout) != (dtype, layout):
        return f"gives a tensor of {leaf.dtype}, {leaf.layout}, and not of {dtype}, {layout} as"
    if kind is not None and type(leaf) is not kind:
        return f"gives a {type(leaf).__name__}, and not a {kind.__name__} as"
    if gradient is not None and leaf.requires_grad is not gradient:
        return f"gives a tensor of requires_grad={leaf.requires_grad}, and not {gradient} as"
    shape = tuple(leaf.shape)
    if len(shape) != len(sizes):
        return f"gives the shape {shape}, and not one of {len(sizes)} dimensions as"
    known = tuple(k if n is None else n for n, k in zip(sizes, shape, strict=True))
    return "" if shape == known else f"gives the shape {shape}, and not {known} as"


def _decided(recorded: Recorded, how: str) -> str:
    asker = recorded.asker
    goes = "the Python around it" if asker is None else f"the forward of {asker or 'the model'}"
    closer = recorded.path if asker is None else asker
    closed = f", or keep_closed=[{closer!r}]" if closer else ""
    return (
        f"{recorded.label} {how} when it was recorded. That depends on values, which made no "
        f"difference in the example, and {goes} goes by it. Give an example whose rows differ in "
        f"what decides it{closed}"
    )
