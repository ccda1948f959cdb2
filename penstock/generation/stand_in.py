"""A model whose forward is somebody else's: what a model's own `generate` calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from penstock.capture.dims import Dynamic, positional_names
from penstock.capture.trees import flatten_result, is_plain_object
from penstock.sessions.resident import Resident

_REPLACED: Mapping[str, Callable[..., Any]] = {
    # the forward waits for other threads, which is not for compilers
    "_valid_auto_compile_criteria": lambda *args, **kwargs: False,
    # it changes the configuration while one group is decoded, and others are not
    "_optimize_model_for_decode": nullcontext,
}
"""Methods that `generate` of transformers calls."""


def stand_in(
    model: nn.Module, forward: Callable[..., Any], called: Callable[[str], None]
) -> nn.Module:
    """A copy of a model, whose calls are calls of `forward`.

    Its submodules and tensors are the model's own. What the copy's methods assign to attributes of
    the model itself stays with the copy.

    Args:
        model: is not changed.
        forward: in place of the model's.
        called: is called with the name of every child that is called, also of children in a
            `ModuleList` or `ModuleDict`.
    """
    copy: nn.Module = object.__new__(type(model))
    vars(copy).update(vars(model), _modules=_noting(model, "", called))
    vars(copy)["forward"] = functools.wraps(model.forward)(forward)
    vars(copy).update({name: own for name, own in _REPLACED.items() if hasattr(model, name)})
    return copy


def _noting(module: nn.Module, prefix: str, called: Callable[[str], None]) -> dict[str, Any]:
    """The parts of a module, which say when they are called."""
    found: dict[str, Any] = {}
    for key, part in module._modules.items():
        found[key] = part
        if part is None or isinstance(part, torch.jit.ScriptModule):  # which lives in C++
            continue
        kind: Any = type(part)
        own: Any = object.__new__(_noting_kind(kind))
        object.__setattr__(own, "_called", functools.partial(called, prefix + key))
        own.__dict__ = vars(part)
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            own.__dict__ = {**vars(part), "_modules": _noting(part, f"{prefix}{key}.", called)}
        found[key] = own
    return found


@functools.cache
def _noting_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of modules that say when they are called; they share the attributes of another."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._called()
        return kind.__call__(self, *args, **kwargs)

    own = {"__slots__": ("_called",), "__call__": call, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, all of them by name where that is possible."""
    names = positional_names(model)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def lengths_in(arguments: Mapping[str, Any]) -> Dynamic:
    """Which dimensions of a call's arguments are lengths, by what generation is.

    A call without states is given all tokens so far: every dimension that is as long counts them.
    One with states is given new tokens; masks count all, and grow.

    Args:
        arguments: of the call, by name.
    """
    leaves = flatten_result(dict(arguments), is_plain_object)[0]
    has_states = any(isinstance(leaf, Resident) for leaf in leaves)
    tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.ndim > 1}
    encoded = arguments.get("encoder_outputs")
    source = encoded[0].shape[1] if encoded is not None else None
    found: dict[str | int, dict[int, str]] = {}
    if source is not None:
        for name in ("attention_mask", "encoder_attention_mask"):
            if name in tensors and tensors[name].shape[1] == source:
                found[name] = {1: "source"}
                del tensors[name]
        found["encoder_outputs"] = {1: "source"}
    new = next((t.shape[1] for n, t in tensors.items() if "ids" in n or "embeds" in n), None)
    for name, tensor in tensors.items():
        dims = range(1, tensor.ndim if _is_mask(tensor) else 2)
        sizes = {dim: tensor.shape[dim] for dim in dims}
        if has_states:
            own = {dim: "total" for dim, n in sizes.items() if n != new and n > 1}
        else:
            own = {dim: "length" for dim, n in sizes.items() if n == new and n > 1}
        if own:
            found[name] = own
    return found


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4 or not tensor.is_floating_point()
