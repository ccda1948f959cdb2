"""Where a model's own forward parts from the program that was recorded of it, and why."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture import Program, Size, Trace, untouched
from penstock.capture.calls import Call, Sizes, Unrecordable
from penstock.capture.equality import same_tensor
from penstock.capture.replay import ForwardResults, replay_results
from penstock.capture.trees import flatten
from penstock.engine.span import MicroBatch
from penstock.errors import Difference
from penstock.plan import Plan

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_CHANGED = (
    "what its Python reads besides tensors (an attribute, a module-level variable, a closure, a "
    "file, the clock) is not what it was when it was recorded"
)


def difference(
    program: Program,
    trace: Trace,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    microbatch: MicroBatch,
) -> Difference:
    """The first call of the model's own forward that is not as it was recorded.

    An error in the search itself is not raised but described in `why`, as it is known already that
    something differs.

    Args:
        program: the recording.
        trace: the way that the micro-batch takes.
        plan: which calls each stage has.
        args, kwargs: the arguments of the model for this micro-batch.
        microbatch: its sizes and random key.
    """
    try:
        return _first(program, trace, plan, args, kwargs, microbatch)
    except Exception as error:
        failed = f"the search for the call failed ({type(error).__name__}: {error})"
        return Difference(None, None, "", _module(program.model, ""), f"{_CHANGED}; {failed}")


def _first(
    program: Program,
    trace: Trace,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    microbatch: MicroBatch,
) -> Difference:
    model, key = program.model, microbatch.key
    stopped = ""
    with untouched(model), torch.no_grad():
        forward = ForwardResults(program, model, key)  # made inside, where it sees the copies
        try:
            forward.run(args, kwargs)
        except Unrecordable as error:
            stopped = error.why
        except Exception as error:
            stopped = f"it raises {type(error).__name__}: {error}"
    with untouched(model), torch.no_grad():
        ours = replay_results(program, model, args, kwargs, key, trace)
    known = {call.identity: number for number, call in enumerate(trace.calls)}
    reached = -1
    for call in forward.trace.calls:
        number = known.get(call.identity)
        if number is None:
            why = f"the forward calls {call.label} now, which it did not when it was recorded"
            return _difference(program, trace, plan, reached + 1, call, why)
        reached = number
        old = trace.calls[number]
        changed = _constants(old, call, microbatch.sizes)
        if changed:
            why = f"the forward passes {changed[1]!r} where it passed {changed[0]!r} when recorded"
            return _difference(program, trace, plan, number, old, why)
        pairs = zip(
            ours.get(call.identity, ()), forward.results.get(call.identity, ()), strict=False
        )
        if not all(same_tensor(a, b) for a, b in pairs):
            why = "it gives something else, and nothing before it does"
            return _difference(program, trace, plan, number, old, why)
    if stopped:
        return _difference(program, trace, plan, reached + 1, None, stopped)
    if reached < len(trace.calls) - 1:
        old = trace.calls[reached + 1]
        why = f"the forward calls {old.label} no more, which it did when it was recorded"
        return _difference(program, trace, plan, reached + 1, old, why)
    why = (
        "every call gives here what it gave in the recording, so it is in the backward or in where "
        "a worker runs it: what was changed here after the pipeline was built, a module-level "
        "variable, say, which worker processes do not see"
    )
    return Difference(None, None, "", "", why)


def _difference(
    program: Program, trace: Trace, plan: Plan, number: int, call: Call | None, why: str
) -> Difference:
    ends = [stage.calls[1] for stage in plan.stages]
    stage = min(bisect_right(ends, number), len(ends) - 1) if trace is program.train else None
    label = call.label if call else ""
    path = call.path if call else ""
    if call is not None and isinstance(call.target, str):
        path = call.target
    return Difference(stage, number, label, _module(program.model, path), why)


def _module(model: nn.Module, path: str) -> str:
    """A module in words: its path and its class."""
    kind = type(dict(model.named_modules()).get(path, model)).__name__
    return f"{path} ({kind})" if path else f"the model itself ({kind})"


def _constants(old: Call, new: Call, sizes: Sizes) -> tuple[Any, Any] | None:
    """The recorded and the present value of a call's first changed constant; `None` if none."""
    (ours, structure), (theirs, other) = (flatten((c.args, c.kwargs)) for c in (old, new))
    if structure != other:
        return None
    for before, now in zip(ours, theirs, strict=True):
        before = before.at(sizes) if isinstance(before, Size) else before
        plain = isinstance(before, _PLAIN) and isinstance(now, _PLAIN)
        if plain and (type(before) is not type(now) or before != now):
            return before, now
    return None
