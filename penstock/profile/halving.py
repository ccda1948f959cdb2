"""Which calls have a backward in two halves, and how it divides between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture import Attribute, Call
from penstock.capture.attributes import find
from penstock.capture.calls import Trace, function_name
from penstock.profile.timing import now, roots_of

_MODULES = {
    *(nn.Linear, nn.Embedding),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
_FUNCTIONS = {
    *("linear", "embedding", "addmm", "mm", "matmul", "__matmul__", "bmm"),
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_be_halved(trace: Trace, model: nn.Module) -> list[bool]:
    """For every call, whether the gradients of its weights can be computed later, and apart.

    So it is with one product for the input and one for the weights: linear layers, convolutions,
    embeddings. A parameter that several calls use gets its gradient from all of them at once.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(name for call in trace.calls for name in set(weight_names(call)))
    return [
        _is_product(call, model)
        and any(name in parameters for name in weight_names(call))
        and all(uses[name] == 1 for name in weight_names(call))
        for call in trace.calls
    ]


def weight_names(call: Call) -> tuple[str, ...]:
    """The parameters and buffers that a call uses, by name."""
    return *call.hidden, *(v.name for v in call.reads() if isinstance(v, Attribute))


def _is_product(call: Call, model: nn.Module) -> bool:
    if not isinstance(call.target, str):
        return function_name(call.target) in _FUNCTIONS
    module = model.get_submodule(call.target)
    return type(module) in _MODULES and not any(getattr(module, hooks) for hooks in _HOOKS)


def trained_weights(call: Call, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a call uses and that get a gradient, as `model` holds them."""
    tensors = [find(model, name) for name in weight_names(call)]
    return [p for p in tensors if isinstance(p, nn.Parameter) and p.requires_grad]


def weight_share(
    results: Sequence[Any],
    entering: Sequence[Any],
    weights: Sequence[nn.Parameter],
    device: torch.device,
) -> float:
    """The part of a backward's time that the gradients of its weights take, from 0 to 1.

    Args:
        results: of a call; their graph is still there, and is let go.
        entering: the values that the call was given.
        weights: its parameters.
        device: where it ran.
    """
    roots = roots_of(results)
    inputs = [v for v in entering if isinstance(v, torch.Tensor) and v.requires_grad]
    if not roots or not weights:
        return 0.0
    if not inputs:
        return 1.0
    gradients = [torch.ones_like(root) for root in roots]
    clock = [now(device)]
    for wanted in (inputs, weights):
        torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
        clock.append(now(device))
    return (clock[2] - clock[1]) / (clock[2] - clock[0])
