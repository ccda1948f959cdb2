"""The tensors that a model holds, by qualified names.

They are parameters, buffers and plain tensor attributes, also those in lists, tuples and
dictionaries, whose places are parts of the name: `anchors.0`, `tables.user`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The names of the registries of a module's hooks."""

HOOKS_OF_MODULES = itemgetter(*HOOKS)
"""The hooks of a module, of each kind, in its `vars`."""

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""The attributes of every module that hold what it has registered."""

_CONTAINERS = (list, tuple, dict)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model with their names.

    Parameters and buffers come under every name that reaches them; other tensors only under the
    first name of the module that has them.
    """
    places = list(model.named_modules(remove_duplicate=False))
    for registry in ("_parameters", "_buffers"):
        for path, module in places:
            for name, tensor in getattr(module, registry).items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, tensor
    seen = set()
    for path, module in places:
        if id(module) in seen:
            continue
        seen.add(id(module))
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name in REGISTRIES:
                continue
            if isinstance(value, torch.Tensor):
                yield prefix + name, value
            elif type(value) in _CONTAINERS and value:
                for key, held in held_tensors(value):
                    yield f"{prefix}{name}.{key}", held


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors which share memory have in common, while they live."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def alike(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """For every name, one name that all tensors with overlapping memory have in common."""
    found: dict[str, str] = {}
    places = sorted((*_place(tensor), name) for name, tensor in tensors)
    memory, end, first = -1, 0, ""
    for own, start, stop, name in places:
        if own != memory or start >= end:
            memory, end, first = own, stop, name
        end = max(end, stop)
        found[name] = first
    return found


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The memory that a tensor lies in, its first byte there, and the byte after its last."""
    if tensor.layout is not torch.strided:
        return memory_of(tensor), 0, 1
    start = int(tensor.storage_offset()) * tensor.itemsize
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return memory_of(tensor), start, start + (extent * tensor.itemsize if tensor.numel() else 0)


def left_behind(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """The qualified names of attributes in which a forward has left a tensor or a float.

    These are attributes that were assigned a tensor, a float, or a container of tensors, and all
    tensors with a `grad_fn`, also those that the forward has added to an existing container.

    Args:
        model: the model after the forward.
        before: the result of `attributes_of_all` before the forward.
    """
    with_history = (name for name, held in named_tensors(model) if held.grad_fn is not None)
    return frozenset(with_history).union(
        f"{path}.{name}".lstrip(".")
        for path, own in attributes_of_all(model).items()
        for name, value in own.items()
        if value is not before.get(path, {}).get(name)
        and (isinstance(value, (torch.Tensor, float)) or held_tensors(value))
    )


def attributes_of_all(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For every module by name its attributes, buffers and parameters, as they are now."""
    return {
        path: {
            **{name: value for name, value in vars(module).items() if name not in REGISTRIES},
            **module._buffers,
            **module._parameters,
        }
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }


def owner_of(model: nn.Module, attribute: str) -> tuple[str, str]:
    """The path of the module that has an attribute, and its name there, without container keys."""
    parts, path = attribute.split("."), ""
    modules = dict(model.named_modules(remove_duplicate=False))
    while (inner := f"{path}.{parts[0]}".lstrip(".")) in modules:
        path = inner
        parts.pop(0)
    return path, parts[0]


def held_tensors(value: Any) -> list[tuple[Any, torch.Tensor]]:
    """The tensors directly in a list, tuple or dictionary, with their indices or keys.

    Only keys that can be part of a qualified name count: strings without a dot.
    """
    items: Any = ()
    if type(value) in (list, tuple):
        items = enumerate(value)
    elif type(value) is dict:
        items = ((k, v) for k, v in value.items() if isinstance(k, str) and "." not in k)
    return [(key, held) for key, held in items if isinstance(held, torch.Tensor)]


def find(model: nn.Module, name: str) -> Any:
    """The object with this qualified name in the model; `None` if there is none."""
    found: Any = model
    for part in name.split("."):
        if type(found) in (list, tuple):
            place = int(part) if part.isdecimal() else len(found)
            found = found[place] if place < len(found) else None
        elif type(found) is dict:
            found = found.get(part)
        else:
            found = getattr(found, part, None)
    return found


def put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace what has this qualified name in the model by a tensor."""
    path, _, last = name.rpartition(".")
    owner = find(model, path) if path else model
    if type(owner) is list:
        owner[int(last)] = tensor
    elif type(owner) is dict:
        owner[last] = tensor
    elif type(owner) is tuple:
        place = int(last)
        put(model, path, (*owner[:place], tensor, *owner[place + 1 :]))  # type: ignore[arg-type]
    else:
        setattr(owner, last, tensor)
