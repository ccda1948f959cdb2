"""Which BatchNorms and InstanceNorms use their running statistics as torch's own do."""

from __future__ import annotations

from itertools import chain

from torch import nn

from penstock.capture.attributes import HOOKS_OF_MODULES
from penstock.torch_internals import BatchNorm, InstanceNorm

NORMS = (BatchNorm.forward, InstanceNorm.forward)
"""Forwards of norms whose backwards, in training, do not use the running statistics."""

_KNOWN = ("timm.layers.norm_act.BatchNormAct2d",)
"""Classes of others whose forwards do nothing with these statistics but pass them to `batch_norm`.

They are known by their names: what a forward does with a buffer is not to be seen from outside, and
a mistake would be a wrong gradient.
"""


def is_small_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm whose children, if any, have no parameters or buffers.

    A child may be an activation, for instance.
    """
    return isinstance(module, BatchNorm) and not any(
        True for child in module.children() for _ in chain(child.parameters(), child.buffers())
    )


def only_normalises(module: nn.Module) -> bool:
    """Whether the backwards of a norm in training do not use its running statistics.

    Its forward has to be torch's own, or that of a class in `_KNOWN`, and neither it nor its
    children may have hooks of the user's or a forward of their own.
    """
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_known = getattr(kind, "forward", None) in NORMS or name in _KNOWN
    return is_known and not any(map(is_patched, module.modules()))


def is_patched(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's, or another forward than its class."""
    own = vars(module)
    return "forward" in own or any(
        not getattr(hook, "__module__", "").startswith("penstock.")
        for registry in HOOKS_OF_MODULES(own)
        for hook in registry.values()
    )
