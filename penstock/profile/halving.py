"""Which calls have a backward in two halves, and how it divides between them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from penstock.capture import Attribute, Call, Program
from penstock.capture.attributes import find
from penstock.capture.halves import (
    Deferral,
    Half,
    is_one_product,
    may_be_halved,
    run_halved,
    run_pending,
)
from penstock.devices.streams import on
from penstock.profile.timing import Stopwatch, roots_of

_TINY = 50  # backwards of a layer that does next to nothing


def halved_calls(program: Program) -> list[bool]:
    """For every call, whether its backward may be halved, if it turns out to be one product."""
    model = program.model
    found = may_be_halved(program.train, model)
    for number, call in enumerate(program.train.calls):
        if isinstance(call.target, str):
            module = model.get_submodule(call.target)
            found[number] &= not (module._backward_hooks or module._backward_pre_hooks)
    return found


def trained_weights(call: Call, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a call uses and that get a gradient, as `model` holds them."""
    read = (value.name for value in call.reads() if isinstance(value, Attribute))
    tensors = [find(model, name) for name in dict.fromkeys((*call.hidden, *read))]
    return [p for p in tensors if isinstance(p, nn.Parameter) and p.requires_grad]


def halving_seconds(device: torch.device) -> float:
    """What it costs to halve the backward of a call, however small: seconds of a micro-batch."""
    one = torch.ones(1, 1, device=device)
    entering, weight, deferral = one.clone().requires_grad_(), nn.Parameter(one), Deferral()
    half = Half(deferral)

    def seconds(run: Callable[..., torch.Tensor]) -> float:
        watch = Stopwatch(device)
        with watch:
            run(entering, weight).backward()
            run_pending(deferral.take())
        return watch.seconds()[0]

    with on(device):
        found = [
            (seconds(lambda x, w: run_halved(half, linear, x, w)), seconds(linear))
            for _ in range(_TINY)
        ]
    halved, whole = map(statistics.median, zip(*found, strict=True))
    return float(max(halved - whole, 0.0))


def launch_and_rate(found: Mapping[int, float], totals: Mapping[int, float]) -> tuple[float, float]:
    """Fit what halving costs as `launch + rate * rows`, with neither of them negative.

    If the line through the measurements is not possible, one of the two is 0 and the other is found
    by least squares. A measured cost is the difference of two noisy times, so it may be far off or
    negative, the more the longer these times are; so errors count relative to `totals`.

    Args:
        found: the seconds that halving cost, by rows: one or two measurements.
        totals: seconds of forward and backward, by rows.

    Returns:
        the launch in seconds, and the rate in seconds per row.
    """
    few, many = min(found), max(found)
    if few == many:  # a row costs as much in other sizes
        return 0.0, max(found[few] / few, 0.0)
    rate = (found[many] - found[few]) / (many - few)
    launch = found[few] - rate * few
    if launch >= 0 and rate >= 0:
        return launch, rate

    def fitted(shape: Callable[[int], float]) -> tuple[float, float]:
        """The factor that brings the shape nearest, and how far off it still is."""
        pairs = [(shape(rows) / totals[rows], found[rows] / totals[rows]) for rows in found]
        factor = max(sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs), 0.0)
        return factor, sum((factor * x - y) ** 2 for x, y in pairs)

    rate, rate_off = fitted(float)
    launch, launch_off = fitted(lambda _: 1.0)
    return (0.0, rate) if rate_off <= launch_off else (launch, 0.0)


def weight_share(
    results: Sequence[Any],
    entering: Sequence[Any],
    weights: Sequence[nn.Parameter],
    device: torch.device,
) -> float:
    """The part of a backward's time that the gradients of its weights take, from 0 to 1.

    Args:
        results: the results of a call, with their graph, which is kept.
        entering: the values that the call was given.
        weights: the parameters of the call that get a gradient.
        device: the device that the call ran on.
    """
    roots = roots_of(results)
    inputs = [v for v in entering if isinstance(v, torch.Tensor) and v.requires_grad]
    if not weights or len(roots) != 1 or not is_one_product(roots[0]):
        return 0.0
    if not inputs:
        return 1.0
    gradients = [torch.ones_like(root) for root in roots]
    watch = Stopwatch(device)
    for wanted in (inputs, weights):
        with watch:
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    of_inputs, of_weights = watch.seconds()
    together = of_inputs + of_weights
    return of_weights / together if together else 0.0  # too short for the device's clock
