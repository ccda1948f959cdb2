"""What a user's function reads besides its arguments, as far as that shows without running it.

It is needed where a forward leaves a tensor in an attribute of its module (the balance loss of a
mixture of experts, say) for the loss to find. With several stages the module is micro-batches
ahead of the loss, or in another process, so the loss would find another micro-batch's, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError

_MOST = 2000  # objects that are looked at


@dataclass(frozen=True)
class Left:
    """What the forward of a model leaves in attributes, out of the loss's reach.

    Attributes:
        model: whose.
        attributes: for each the path of its module, and its name there.
    """

    model: nn.Module
    attributes: Sequence[tuple[str, str]]


def check_reads(what: str, function: Any, left: Left) -> None:
    """Raise if a function reads what a forward leaves where it is not the micro-batch's own.

    Args:
        what: what the function is, in words.
        function: the user's.
        left: what there is.

    Raises:
        InputError: it does, by all appearances.
    """
    if not left.attributes or function is None:
        return
    modules, names = reads_of(function, left.model)
    for path, name in left.attributes:
        if id(left.model.get_submodule(path)) in modules and name in names:
            raise InputError(
                f"the {what} reads {name!r} of the module {path or '(the whole model)'!r}, where "
                "its forward leaves it. That module runs in another stage or process, ahead of the "
                f"{what}, so that would be of another micro-batch, without its gradients. Return "
                "it from the model's forward as a part of the output: loss_fn=lambda output, "
                f"target: criterion(output[0], target) + output[1], with {name!r} as output[1]. "
                f"If that is so already, leave only {name}.detach() in the module"
            )


def reads_of(function: Any, model: nn.Module) -> tuple[set[int], set[str]]:
    """The modules of a model that a function has at hand, by id, and the names in its code.

    Functions that it calls are looked into, if they are at hand, and methods of these modules.
    """
    of_model = {id(module) for module in model.modules()}
    modules: dict[int, nn.Module] = {}
    names: set[str] = set()
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting and len(seen) < _MOST:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, nn.Module) and id(found) in of_model:
            modules.update({id(module): module for module in found.modules()})
        else:
            waiting += _held(found, names)
        if not waiting:
            waiting += _methods(modules.values(), names)
    return set(modules), names


def _held(found: Any, names: set[str]) -> Iterable[Any]:
    """What an object has at hand; the names in its code are added to `names`."""
    if isinstance(found, partial):
        return [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, FunctionType):
        return at_hand(found, names)
    if isinstance(found, Mapping):
        return list(found.values())
    if isinstance(found, (list, tuple, set)):
        return list(found)
    if isinstance(found, (torch.Tensor, type)) or is_torchs(type(found).__module__):
        return []
    call = getattr(type(found), "forward" if isinstance(found, nn.Module) else "__call__", None)
    return [call, *getattr(found, "__dict__", {}).values()]


def at_hand(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """What a function has at hand: globals, defaults, what it encloses; names are added."""
    if is_torchs(function.__module__):
        return
    own = {name for code in codes(function.__code__) for name in code.co_names}
    names |= own
    yield from (function.__globals__[name] for name in own if name in function.__globals__)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue


def is_torchs(module: str | None) -> bool:
    """Whether a module of this name is PyTorch's, or Python's own."""
    return (module or "").partition(".")[0] in ("torch", "builtins")


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def _methods(modules: Iterable[nn.Module], names: Collection[str]) -> Iterator[FunctionType]:
    """Those of the modules' classes that have one of these names."""
    for kind in {type(module) for module in modules}:
        for name in names:
            method = getattr(kind, name, None)
            if isinstance(method, FunctionType) and not is_torchs(method.__module__):
                yield method
