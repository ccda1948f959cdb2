"""Detects what replicas in separate processes would remember differently from one device.

Each such replica has its own copies of modules and functions. If these remember something from one
micro-batch to the next, each copy remembers other micro-batches than one device would. That is an
error, as the results would have other bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from penstock.capture.attributes import HOOKS_OF_MODULES
from penstock.capture.equality import same_tensor
from penstock.capture.preserve import own_generators
from penstock.engine.ends import Loss
from penstock.engine.span import Span
from penstock.engine.user_functions import may_have_effects
from penstock.errors import InputError
from penstock.links.pickling import pack
from penstock.torch_internals import BatchNorm
from penstock.workers.ways import modules_of


def nothing() -> None:
    """The default of `SideEffects.bring`: forwards have left nothing."""


@dataclass(frozen=True)
class SideEffects:
    """What forwards, losses and hooks have left with workers that are about to be replaced.

    Attributes:
        remembers: names what remembers something from micro-batch to micro-batch, so that replicas
            in separate processes cannot run it; empty if nothing does.
        bring: copies it to this process, for the next workers.
    """

    remembers: str = ""
    bring: Callable[[], None] = nothing


_HOOKS_OF_PARAMETERS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")  # or None


class Losses:
    """The loss and metrics functions that were called, one for each code object."""

    def __init__(self) -> None:
        self._called: dict[object, object] = {}

    def note(self, loss: Loss | None) -> None:
        """A pass has this loss; called at every step."""
        for function in (loss.function, loss.metrics) if loss else ():
            if function is not None:
                self._called[getattr(function, "__code__", type(function))] = function

    def may_remember(self) -> bool:
        """Whether one of them may do more than return something, as far as their code shows."""
        return any(map(may_have_effects, self._called.values()))


def check_memories(spans: Iterable[Span], replicas: int, model: nn.Module) -> None:
    """Raise if forwards remember something in attributes or generators.

    Args:
        spans: what they run.
        replicas: how many there are.
        model: which they are parts of.

    Raises:
        InputError: they do.
    """
    spans = list(spans)
    generators = (m for m in modules_of(spans) if any(own_generators(m)))
    attributes = (m for span in spans for memory in span.memories for m in memory)
    module = next(chain(generators, attributes), None)
    if module is not None:
        raise InputError(
            f"replicas={replicas}: {_named(module, model)} remembers something from forward to "
            "forward in an attribute or a random generator of its own, which replicas in other "
            'processes do not see; use workers="threads", or replicas=1'
        )


def check_buffers(spans: Iterable[Span], replicas: int, model: nn.Module) -> None:
    """Raise if forwards change buffers, except for the running statistics of BatchNorms.

    Args:
        spans, replicas, model: as of `check_memories`.

    Raises:
        InputError: they do; or they change running statistics of a BatchNorm that the program has
            opened, or of one that is recomputed and that others know by hooks or as a part.
    """
    spans = list(spans)
    modules = modules_of(spans)
    running = {
        id(buffer)
        for module in modules
        if isinstance(module, BatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    for span in spans:
        changing = {id(tensor) for tensor in span.changing}
        span.keep_apart()
        apart = {id(buffer) for module in span.apart for buffer in module.buffers(recurse=False)}
        if span.recompute and changing - apart:
            raise InputError(
                "a forward changes buffers of modules that are to be recomputed, which would "
                'disturb other replicas; use recompute="none", or replicas=1'
            )
        changing -= running
        inside = span.module.modules() if isinstance(span.module, nn.Module) else ()
        for module in inside:
            if any(id(buffer) in changing for buffer in module.buffers(recurse=False)):
                raise InputError(
                    f"replicas={replicas}: a forward changes buffers of {_named(module, model)}, "
                    "and replicas that have a model each would change them in another order than "
                    "one device (only the running statistics of BatchNorms can be put in order). "
                    'Use workers="threads" or "processes", or replicas=1'
                )


@contextmanager
def unchanged(loss: Loss | None, modules: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Around a pass of a replica with its own loss function, metrics function and hooks.

    Hooks that cannot be pickled are not looked at.

    Args:
        loss: has the loss function and the metrics function.
        modules: the modules whose hooks, and those of their parameters, are looked at.

    Raises:
        InputError: the pass has changed what one of them holds; or the loss function or the metrics
            function cannot be pickled, so that this cannot be known.
    """
    own = {id(tensor) for m in modules for tensor in (*m.parameters(False), *m.buffers(False))}
    functions = _State((loss.function, loss.metrics) if loss else (), own)
    if functions.problem is not None:
        raise InputError(
            "whether the loss function or the metrics function remembers anything, which other "
            f"replicas would not see, cannot be known, as pickling it fails: {functions.problem}. "
            'Use a function without such attributes, workers="threads", or replicas=1'
        )
    hooks = [_State(hook, own) for hook in _hooks_of(modules)]
    yield
    if functions.has_changed():
        raise InputError(
            "the loss function or the metrics function has changed when it was called, and every "
            'replica is a process with functions of its own; use workers="threads", or replicas=1'
        )
    for hook in hooks:
        if hook.problem is None and hook.has_changed():
            raise InputError(
                f"the hook {_name_of(hook.function)} has changed when it was called: it remembers "
                "something from micro-batch to micro-batch, and every replica is a process with "
                'hooks of its own; use workers="threads", or replicas=1'
            )


def _named(module: nn.Module, model: nn.Module) -> str:
    return next((repr(n) for n, m in model.named_modules() if m is module), "a module")


class _State:
    """What functions hold at the time when this is made.

    Args:
        function: one, or several.
        known: the ids of tensors that are not compared.

    Attributes:
        function: as given.
        problem: what pickling the functions raised; `None` if it succeeded.
    """

    def __init__(self, function: object, known: Collection[int]) -> None:
        self.function = function
        self.problem: Exception | None = None
        self._known = known
        try:
            self._data, tensors = self._packed()
        except Exception as error:  # objects of the user's, which may raise anything
            self.problem = error
        else:
            self._tensors = [tensor.detach().clone() for tensor in tensors]

    def has_changed(self) -> bool:
        """Whether the functions hold something else now."""
        data, tensors = self._packed()
        return data != self._data or not all(map(same_tensor, self._tensors, tensors))

    def _packed(self) -> tuple[bytes, list[torch.Tensor]]:
        data, tensors = pack(self.function)
        return data, [tensor for tensor in tensors if id(tensor) not in self._known]


def _name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _hooks_of(modules: Iterable[nn.Module]) -> Iterator[Callable[..., object]]:
    """The hooks of modules and of their parameters."""
    modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    parameters = {id(p): p for m in modules for p in m.parameters(recurse=False)}
    registries = [registry for m in modules for registry in HOOKS_OF_MODULES(vars(m))]
    registries += [r for p in parameters.values() for r in _HOOKS_OF_PARAMETERS(p)]
    for registry in filter(None, registries):
        yield from map(inspect.unwrap, list(registry.values()))
