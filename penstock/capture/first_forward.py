"""The marks that the first forward of a model leaves: flags, classes and hooks.

Some models install hooks when they are first called, and note that they have, or create the class
of their results. If the first forward does nothing else besides, a recording of a later forward
stands for it as well, and no module has to be closed. `first_forward` finds out whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture.attributes import HOOKS
from penstock.capture.equality import same
from penstock.capture.objects import Objects
from penstock.capture.preserve import MAPPINGS, buffers_kept, entries, objects_kept, put_back
from penstock.capture.randomness import generators_kept
from penstock.capture.trees import tree_leaves

_PLAIN = (bool, int, float, str, type(None), type)


class _Attributes(NamedTuple):
    """A module's attributes, and what its registries, hooks and other containers hold."""

    own: dict[str, Any]
    contents: dict[str, dict[Any, Any]]


def first_forward(model: nn.Module, forward: Callable[[], Any]) -> bool:
    """Run a model's first forward, and keep the marks that it leaves if a second one adds none.

    The marks are kept if the second forward gives the same result. Attributes that every forward
    assigns are put back. If the marks are not kept, everything that the first forward has changed
    is put back.

    Args:
        model: the model.
        forward: runs the model's forward, in evaluation mode.

    Returns:
        whether the marks were kept.
    """
    modules = list(model.modules())
    before = list(map(_attributes, modules))
    changed, result = _run(model, forward)
    first = list(map(_attributes, modules))
    stay = _is_repeated(model, before, forward, changed, result)
    if _put_back_assigned(modules, before, first):
        stay = stay and _is_repeated(model, before, forward, changed, result)
        _put_back_assigned(modules, before, first)
    if stay and all(map(_only_marks, before, map(_attributes, modules))):
        return True
    for module, attributes in zip(modules, before, strict=True):
        put_back(module, *attributes)
    return False


def _is_repeated(
    model: nn.Module,
    before: list[_Attributes],
    forward: Callable[[], Any],
    changed: set[Any],
    result: Any,
) -> bool:
    """Whether another forward does what the first one did, and hooks of the first only look on.

    It has to change the same plain objects: if it does not, a mark may have kept it from doing so.
    """
    try:
        with _watched(model, before) as acting:
            again, other = _run(model, forward)
    except Exception:  # the user's own: it does not run twice
        return False
    return not acting and again == changed and same(result, other)


def _run(model: nn.Module, forward: Callable[[], Any]) -> tuple[set[Any], Any]:
    """What a forward changes in plain objects, and its result.

    These objects are restored afterwards, and so are buffers and random generators.
    """
    modules = list(model.modules())
    uncompiled = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    devices = {parameter.device for parameter in model.parameters()}
    buffers = buffers_kept(model, [name for name, _ in model.named_buffers()])
    with torch.no_grad(), objects_kept(modules), generators_kept(devices), buffers:
        objects = Objects(uncompiled, classes=True)
        result = forward()
        return set(objects.changed()), result


class _Watched:
    """Runs a hook, and notes if it does more than look on.

    Args:
        hook: a forward hook or forward pre-hook of a module.
        acting: the list to which the hook is added if it returns something of its own, or changes
            a tensor in place.
    """

    def __init__(self, hook: Callable[..., Any], acting: list[object]) -> None:
        self._hook = hook
        self._acting = acting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook does."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = self._hook(*args, **kwargs)
        is_given = result is None or result is args[-1]
        if not is_given or versions != [tensor._version for tensor in tensors]:
            self._acting.append(self._hook)
        return result


@contextmanager
def _watched(model: nn.Module, before: list[_Attributes]) -> Iterator[list[object]]:
    """While open, the hooks that were not there before are watched; yields those that act.

    Backward hooks are not run here, so what they do cannot be seen: they count as acting.
    """
    acting: list[object] = []
    replaced: list[tuple[dict[Any, Any], Any, Any]] = []
    for module, (_, contents) in zip(model.modules(), before, strict=True):
        for name in HOOKS:
            registry = vars(module)[name]
            for key in registry.keys() - contents.get(name, {}).keys():
                replaced.append((registry, key, registry[key]))
                registry[key] = _Watched(registry[key], acting)
                acting += [module] if "backward" in name else []
    try:
        yield acting
    finally:
        for registry, key, hook in replaced:
            if key in registry:
                registry[key] = hook


def _put_back_assigned(
    modules: list[nn.Module], before: list[_Attributes], once: list[_Attributes]
) -> bool:
    """Put back attributes assigned since the first forward; returns whether there were any."""
    found = False
    for module, (old, _), (first, _) in zip(modules, before, once, strict=True):
        own = vars(module)
        for name in [name for name, value in own.items() if value is not first.get(name, own)]:
            found = True
            if name in old:
                own[name] = old[name]
            else:
                del own[name]
    return found


def _attributes(module: nn.Module) -> _Attributes:
    own = dict(module.__dict__)
    return _Attributes(own, {name: entries(held) for name, held in own.items() if _holds(held)})


def _holds(value: object) -> bool:
    return type(value) in (list, *MAPPINGS)


def _only_marks(before: _Attributes, now: _Attributes) -> bool:
    old = before.own
    changed = [v for name, v in now.own.items() if name not in old or v is not old[name]]
    kept = all(
        _same_items(items, now.contents.get(name, {}))
        for name, items in before.contents.items()
        if not name.endswith("_hooks")
    )
    return kept and all(type(value) in _PLAIN for value in changed)


def _same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
