"""A second set of modules over the same weights, to be run and measured in the model's place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import copy, deepcopy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES, held_tensors


def shadow(model: nn.Module, device: torch.device, written: Iterable[str] = ()) -> nn.Module:
    """Modules like those of `model`, whose parameters share memory with the originals.

    Gradients, buffers, attributes and hooks are the shadow's own (it has no hooks), so running it
    forward and backward does not reach the user's model. Weights are copied only for another
    device, and out of modules that torch.jit compiled.

    Args:
        model: the user's.
        device: where the shadow is.
        written: the parameters that a forward changes; they are copied.
    """
    made: dict[int, Any] = {}
    for name in written:
        old = model.get_parameter(name)
        made[id(old)] = nn.Parameter(_moved(old, device), requires_grad=old.requires_grad)
    return _shadow(model, device, made)


def _shadow(module: nn.Module, device: torch.device, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]  # type: ignore[no-any-return]
    if isinstance(module, torch.jit.ScriptModule):
        made[id(module)] = _copy_compiled(module, device)
        return made[id(module)]  # type: ignore[no-any-return]
    if type(module).__name__ == "OptimizedModule":  # of torch.compile; it holds on to its module
        inner: Any = module._orig_mod
        made[id(module)] = type(module)(_shadow(inner, device, made), module.dynamo_ctx)
        return made[id(module)]  # type: ignore[no-any-return]
    twin = made[id(module)] = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name in REGISTRIES:
            continue
        if name.endswith("_hooks") and isinstance(value, dict):
            twin.__dict__[name] = OrderedDict()
        elif isinstance(value, torch.Tensor):
            twin.__dict__[name] = made.setdefault(id(value), _moved(value, device))
        elif isinstance(value, MethodType) and value.__self__ is module:  # a replaced forward
            twin.__dict__[name] = MethodType(value.__func__, twin)
        elif type(value) is partial:  # another one, as Accelerate makes it
            twin.__dict__[name] = _rebound(value, device, made)
        elif type(value) in (list, tuple, dict, set):
            twin.__dict__[name] = made.setdefault(id(value), _copied(value, device))
    twin.__dict__["_parameters"] = {
        name: None if p is None else made.setdefault(id(p), _alias(p, device))
        for name, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        name: None if b is None else made.setdefault(id(b), _moved(b, device))
        for name, b in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        name: None if child is None else _shadow(child, device, made)
        for name, child in module._modules.items()
    }
    return twin


def _rebound(value: partial[Any], device: torch.device, made: dict[int, Any]) -> partial[Any]:
    """The same partial, with the shadow's modules and their methods in place of the user's."""

    def own(argument: Any) -> Any:
        if isinstance(argument, MethodType) and isinstance(argument.__self__, nn.Module):
            return MethodType(argument.__func__, _shadow(argument.__self__, device, made))
        return _shadow(argument, device, made) if isinstance(argument, nn.Module) else argument

    named = {key: own(argument) for key, argument in value.keywords.items()}
    found = partial(own(value.func), *map(own, value.args), **named)
    found.__dict__.update(value.__dict__)
    return found


def _copied(value: Any, device: torch.device) -> Any:
    """A container, with its tensors on the device."""
    held = {key: _moved(tensor, device) for key, tensor in held_tensors(value)}
    if type(value) is tuple:
        return tuple(held.get(k, v) for k, v in enumerate(value))
    twin = copy(value)
    for key, tensor in held.items():
        twin[key] = tensor
    return twin


def _copy_compiled(module: torch.jit.ScriptModule, device: torch.device) -> nn.Module:
    with torch.no_grad():  # or the copies would hang on the originals, and pass gradients on
        twin: nn.Module = deepcopy(module).to(device)
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return twin


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; what has no values stays without."""
    return tensor.detach() if tensor.is_meta else tensor.detach().to(device, copy=True)


def _alias(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    memory = parameter.detach()
    memory = memory if memory.is_meta else memory.to(device)
    return nn.Parameter(memory, requires_grad=parameter.requires_grad)
