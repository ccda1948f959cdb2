"""Recordings that compute next to nothing: the model's own tensors are on `meta` meanwhile.

What a forward does at further sizes, shapes show, so that only one size costs the time and the
memory of running it. Where its Python asks for values, an exception says so, and it is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.capture.calls import Call, Trace
from penstock.capture.trees import flatten, unflatten


def completed(shapes: Trace, real: Trace) -> Trace:
    """A recording of shapes, with what only values show: devices, what is drawn, and written."""
    if len(shapes.calls) != len(real.calls):
        return shapes
    calls = [_completed(*pair) for pair in zip(shapes.calls, real.calls, strict=True)]
    return replace(shapes, calls=calls, changed=real.changed, rewritten=real.rewritten)


def _completed(call: Call, real: Call) -> Call:
    leaves, structure = flatten((call.args, call.kwargs))
    others, other = flatten((real.args, real.kwargs))
    if structure == other:
        leaves = [_placed(*pair) for pair in zip(leaves, others, strict=True)]
    args, kwargs = unflatten(structure, leaves)
    return replace(
        call,
        args=args,
        kwargs=kwargs,
        random=real.random,
        draws_in_python=real.draws_in_python,
        mutates=real.mutates,
    )


def _placed(leaf: Any, real: Any) -> Any:
    on_meta = isinstance(leaf, torch.device) and leaf.type == "meta"
    return real if on_meta and isinstance(real, torch.device) else leaf
