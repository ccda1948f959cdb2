"""Running a user's model without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.capture.randomness import generators

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, `model` and the random generators leave as they came.

    Buffers and plain tensor attributes are swapped for copies meanwhile, so that the user's own
    are never written at all; every module's attributes and training flag, and the generators'
    states, are put back. Parameters are not copied: recording only reads them.
    """
    modules = list(model.modules())
    before = [dict(module.__dict__) for module in modules]
    registries = [{name: dict(module.__dict__[name]) for name in _REGISTRIES} for module in modules]
    drawn_from = generators({p.device for p in model.parameters()})
    states = [generator.get_state() for generator in drawn_from]
    try:
        _swap_tensors(modules)
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


def _swap_tensors(modules: list[nn.Module]) -> None:
    copies: dict[int, torch.Tensor] = {}
    for module in modules:
        for registry in (module._buffers, vars(module)):
            for name, tensor in registry.items():
                if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                    registry[name] = copies.setdefault(id(tensor), tensor.detach().clone())
