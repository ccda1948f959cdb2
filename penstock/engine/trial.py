"""Forwards that leave nothing behind in the modules that they run through."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES, held_tensors
from penstock.capture.preserve import own_generators, own_generators_kept, same_state, state_of
from penstock.engine.state import State

_CONTAINERS = (list, dict, set, OrderedDict)


@contextmanager
def kept(modules: Iterable[nn.Module], changing: Iterable[torch.Tensor]) -> Iterator[None]:
    """Afterwards, these modules are as they were: nothing is left of forwards that ran inside.

    What is in lists, dictionaries and sets among their attributes is put back as well, so are the
    contents of tensors there, and generators of random numbers.

    Args:
        modules: whose.
        changing: the buffers that may be changed in place.
    """
    own = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    every = {id(tensor): tensor for tensor in (*changing, *_attribute_tensors(own))}
    state = State(own, every.values())
    held = [(v, v.copy()) for m in own for v in vars(m).values() if type(v) in _CONTAINERS]
    try:
        with own_generators_kept(own):
            yield
    finally:
        state.put_back()
        for container, before in held:
            container.clear()
            (container.extend if type(container) is list else container.update)(before)


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
        others = [n for n in every if not _same(self._before.get(n), now.get(n))]
        return [*others, *drawn]

    def _now(self) -> dict[str, Any]:
        return {
            f"{path}.{name}".removeprefix("."): value.copy()
            if type(value) in _CONTAINERS
            else value
            for path, module in self._model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, value in vars(module).items()
            if name not in REGISTRIES
        }


def _same(one: Any, other: Any) -> bool:
    """Whether an attribute is the same thing, or a container of the same things."""
    if type(one) is not type(other) or type(one) not in _CONTAINERS:
        return one is other
    if isinstance(one, set):
        return bool(one == other)
    mine, others = (list(c.values()) if isinstance(c, dict) else c for c in (one, other))
    return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))
