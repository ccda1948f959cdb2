"""Forwards that leave nothing behind in the modules that they run through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES, held_tensors
from penstock.capture.objects import Objects
from penstock.capture.preserve import objects_kept, own_generators, same_state, state_of
from penstock.engine.state import State


@contextmanager
def kept(modules: Iterable[nn.Module], changing: Iterable[torch.Tensor]) -> Iterator[None]:
    """Afterwards, these modules are as they were: nothing is left of forwards that ran inside.

    What plain objects and containers among their attributes hold is put back as well, so are the
    contents of tensors there, and generators of random numbers.

    Args:
        modules: whose.
        changing: the buffers that may be changed in place.
    """
    own = _uncompiled(modules)
    every = {id(tensor): tensor for tensor in (*changing, *_attribute_tensors(own))}
    state = State(own, every.values())
    try:
        with objects_kept(own):
            yield
    finally:
        state.put_back()


def _uncompiled(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _attribute_tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The tensors that are plain attributes of modules, or in lists and the like among these."""
    for module in modules:
        for name, value in vars(module).items():
            if name not in REGISTRIES:
                held = [value] if isinstance(value, torch.Tensor) else dict(held_tensors(value))
                tensors = held if isinstance(held, list) else held.values()
                yield from (t for t in tensors if not (t.requires_grad or t.is_meta))


class Attributes:
    """The attributes of a model's modules, but for what they register, as they are now.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._now()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._objects = Objects(_uncompiled(model.modules()), classes=True)
        self._generators = [
            (f"{path}.{name}".removeprefix("."), generator, state_of(generator))
            for path, module in model.named_modules()
            for name, generator in own_generators(module)
        ]

    def changed(self) -> list[str]:
        """The names of those that are others now, or hold something else, or were drawn from."""
        now = self._now()
        every = dict.fromkeys([*self._before, *now])
        drawn = [n for n, g, state in self._generators if not same_state(state_of(g), state)]
        others = [n for n in every if self._before.get(n) is not now.get(n)]
        roots = (self._objects.roots[key] for key in self._objects.changed())
        inside = (f"{self._paths[id(module)]}.{name}".removeprefix(".") for module, name in roots)
        return [*others, *inside, *drawn]

    def _now(self) -> dict[str, Any]:
        return {
            f"{path}.{name}".removeprefix("."): value
            for path, module in self._model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, value in vars(module).items()
            if name not in REGISTRIES
        }
