"""Running a user's model without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from penstock.capture.randomness import generators

REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, `model` and the random generators leave as they came.

    Buffers, and attributes that are tensors or plain containers, are swapped for copies meanwhile,
    so that the user's own are never written at all; every module's attributes and training flag,
    and the generators' states, are put back. Parameters are not copied: recording only reads them.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    compiled = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
    before = [dict(module.__dict__) for module in modules]
    registries = [{name: dict(module.__dict__[name]) for name in REGISTRIES} for module in modules]
    drawn_from = generators({p.device for p in model.parameters()})
    states = [generator.get_state() for generator in drawn_from]
    try:
        _swap_state(modules)
        with _compiled_untouched(compiled):
            yield
    finally:
        for module, attributes, contents in zip(modules, before, registries, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, entries in contents.items():
                registry = module.__dict__[name]
                registry.clear()
                registry.update(entries)
        for generator, state in zip(drawn_from, states, strict=True):
            generator.set_state(state)


@contextmanager
def _compiled_untouched(modules: list[torch.jit.ScriptModule]) -> Iterator[None]:
    """The same for what torch.jit compiled: nothing can be swapped there, so it is put back."""
    flags = [module.training for module in modules]
    buffers = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    try:
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _swap_state(modules: list[nn.Module]) -> None:
    copies: dict[int, Any] = {}
    for module in modules:
        for registry in (module._buffers, vars(module)):
            for name, value in registry.items():
                if isinstance(value, torch.Tensor) and not value.requires_grad:
                    registry[name] = copies.setdefault(id(value), value.detach().clone())
                elif type(value) in (list, dict, set) and name not in REGISTRIES:
                    registry[name] = copies.setdefault(id(value), copy(value))
