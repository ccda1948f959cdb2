"""Calls whose Python looks at values, and may do something else for other values.

The recorded Python around such a call depends on what the call did then. So whenever it runs, its
result is compared with the recorded one.
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
"""What a leaf has to be: `("data", value)` or `("tensor", sizes, dtype, layout, kind, gradient)`.

`None` admits any object. `kind` is the class of the tensor, `gradient` whether it requires one.
`None` among the sizes, for the kind or for the gradient admits any, as no Python depends on it.
"""


@dataclass(frozen=True)
class Recorded:
    """What is known of a call's result.

    Attributes:
        label: the call's label.
        path: the open module that makes the call.
        asker: the module whose Python has read sizes of its result; `None` if none has.
        structure: the structure of the result.
        written: the numbers of the leaves of `(args, kwargs)` that it changed in place.
        same: which objects the result's tensors were, see `Call.same`; `None` if any will do.
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
    """Call a function, or a module, that looks at values, and check that it does as recorded.

    Args:
        recorded: what is known of its result.
        expected: what every leaf of the result has to be.
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
    """Which objects the tensors in a result are, and whether they are views of others.

    Args:
        result: the result of a call.
        given: the leaves of its arguments.

    Returns:
        for every tensor in the result what `Same` describes.
    """
    places = {id(leaf): k for k, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    found = []
    for k, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, torch.Tensor):
            found.append((places.get(id(leaf)), leaf._is_view()))
            places.setdefault(id(leaf), len(given) + k)
    return tuple(found)


def apart(result: Any, given: Sequence[Any], written: Collection[int]) -> Any:
    """A result in which every tensor is an object of its own, and no argument.

    A tensor that is an argument, or occurs twice, may be a different one for other values. Under
    one name, the recording could not distinguish these cases, so it is replaced by an alias.

    Args:
        result: the result of a call.
        given: the leaves of its arguments.
        written: the ids of the arguments that it has changed in place, which may be in the result.
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
    """The result of a call, after a check that it is as it was recorded.

    Args:
        recorded: what is known of the result.
        expected: what every leaf of the result has to be.
        result: the result of the call.

    Raises:
        InputError: the result has another structure, or a leaf is not what it has to be.
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
