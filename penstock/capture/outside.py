"""Tensors that a closed module uses though it does not contain them.

A module may refer to another one by an attribute that registers nothing: a list with its parent, a
bound method. What it uses of that other module does not show in what it contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.capture.attributes import named_tensors
from penstock.capture.calls import function_name
from penstock.capture.interception import METADATA
from penstock.capture.objects import Objects, uncompiled
from penstock.capture.trees import tree_leaves


def leads_outside(module: nn.Module, paths: Mapping[int, str]) -> bool:
    """Whether attributes of a module lead to modules of the model that it does not contain.

    Args:
        module: the module.
        paths: the names of the model's modules, by id.
    """
    own = {id(m) for m in module.modules()}
    theirs = [m for m in uncompiled(module) if not type(m).__module__.startswith("torch.nn.")]
    found = Objects(theirs).modules() if theirs else ()
    return any(id(m) in paths and id(m) not in own for m in found)


class UsedOutside(TorchFunctionMode):
    """While open, notes which tensors functions are given that a module does not contain.

    Functions that only read metadata of a tensor, such as its shape, do not count.

    Args:
        model: the model; only its tensors are noted.
        module: the module that is called meanwhile; `None` if a function is.
        given: the leaves of the arguments of that call, which are not noted.

    Attributes:
        names: the qualified names of these tensors, as keys.
    """

    def __init__(self, model: nn.Module, module: nn.Module | None, given: Iterable[Any]) -> None:
        super().__init__()
        own = () if module is None else named_tensors(module)
        inside = {id(tensor) for _, tensor in own} | set(map(id, given))
        self._outside = {id(t): name for name, t in named_tensors(model) if id(t) not in inside}
        self.names: dict[str, None] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        used = (
            ()
            if function_name(function) in METADATA
            else tree_leaves((tuple(args), dict(kwargs or {})))
        )
        for leaf in used:
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._outside:
                self.names[self._outside[id(leaf)]] = None
        return function(*args, **(kwargs or {}))


def common_owner(paths: Iterable[str]) -> str:
    """The innermost module that contains all of these, by its qualified name."""
    first, *others = (path.split(".") if path else [] for path in paths)
    count = 0
    while count < len(first) and all(other[: count + 1] == first[: count + 1] for other in others):
        count += 1
    return ".".join(first[:count])
