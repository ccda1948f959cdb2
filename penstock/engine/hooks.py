"""Hooks of modules: where a pipeline calls them, and where it would pass them over.

The program calls closed modules whole, and their hooks with them. Of an open module only the calls
inside are left, so a hook that comes after the capture would never be called. (One that was there
before keeps its module closed.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.capture import Program
from penstock.capture.attributes import HOOKS_OF_MODULES
from penstock.capture.opening import check_no_global_hooks, is_collecting
from penstock.capture.watching import with_owners
from penstock.errors import InputError


def hooks_of(modules: Iterable[dict[str, Any]]) -> list[int]:
    """The numbers of the hooks of modules, given by their `vars`; none is ever used twice."""
    registries = chain.from_iterable(map(HOOKS_OF_MODULES, modules))
    return list(chain.from_iterable(filter(None, registries)))  # most are empty


def users_hooks_of(modules: Iterable[nn.Module]) -> list[int]:
    """The numbers of the hooks of modules, without those that Penstock itself registers."""
    registries = chain.from_iterable(HOOKS_OF_MODULES(vars(module)) for module in modules)
    found = chain.from_iterable(registry.items() for registry in filter(None, registries))
    return [number for number, hook in found if not _is_own(hook)]


def _is_own(hook: object) -> bool:
    module = getattr(hook, "__module__", None) or ""
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def _is_hooked(module: nn.Module) -> bool:
    """Whether it has a hook that a pipeline would have to call."""
    hooks = chain.from_iterable(registry.values() for registry in HOOKS_OF_MODULES(vars(module)))
    return not all(map(is_collecting, hooks))


@contextmanager
def silenced(modules: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """While open, users' hooks of these modules are not called; gives the list of them.

    PyTorch's own are, such as those of `weight_norm` and `prune`, which make the weights.
    """
    registries = [
        registry
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)
        for registry in HOOKS_OF_MODULES(vars(module))
    ]
    contents = [dict(registry) for registry in registries]
    silent = [
        (registry, number, hook)
        for registry in registries
        for number, hook in registry.items()
        if not _is_of_torch(hook)
    ]
    try:
        for registry, number, _ in silent:
            registry.pop(number, None)
        yield [hook for *_, hook in silent]
    finally:
        for registry, before in zip(registries, contents, strict=True):
            registry.clear()
            registry.update(before)


def _is_of_torch(hook: object) -> bool:
    """Whether a hook, or a class that its object's is derived from, is PyTorch's."""
    hook = getattr(hook, "__func__", hook)
    if isinstance(hook, partial):
        return _is_of_torch(hook.func)
    homes = [getattr(hook, "__module__", "") or ""]
    homes += [kind.__module__ for kind in type(hook).__mro__]
    return any(home.split(".")[0] == "torch" for home in homes)


class Opened:
    """The modules whose forward is a part of a program: none may have hooks.

    They are looked at before every batch, so what is looked at is gathered once.
    """

    def __init__(self, program: Program) -> None:
        traces = (program.train, program.eval)
        within = {call.path for trace in traces for call in trace.calls}
        within |= {p.module for t in traces for p in t.reads.seen if p.names == ("forward",)}
        paths = {path for inner in within for path in with_owners(inner)}
        modules = dict(program.model.named_modules())
        self._modules = {
            path: modules[path]
            for path in sorted(paths)
            if path in modules and program.is_open(path)
        }
        self._vars = [vars(module) for module in self._modules.values()]

    def check(self) -> None:
        """Raise if one of them has a hook.

        Raises:
            InputError: it has.
        """
        check_no_global_hooks()
        if not hooks_of(self._vars):
            return
        hooked = (path for path, module in self._modules.items() if _is_hooked(module))
        if (path := next(hooked, None)) is None:
            return
        kind = type(self._modules[path]).__name__
        before = f"register them before, or build it with keep_closed=[{path!r}], or "
        raise InputError(
            f"the module {path or '(the whole model)'!r} ({kind}) has hooks that were registered "
            "after the pipeline was built. The program calls what is inside it, so these hooks "
            f"would never be called: {before if path else ''}register them on modules inside it "
            "that have no submodules"
        )
