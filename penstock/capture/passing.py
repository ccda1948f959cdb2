"""A way through a model on which numbers in attributes are values that are passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from penstock.capture.calls import Sizes, Trace
from penstock.capture.numbers import alternatives, can_be_put, further, name_of, put
from penstock.capture.places import Place
from penstock.capture.sizes import differs_from


def passing_in(
    model: nn.Module,
    then: Mapping[Place, Any],
    recorded: Callable[[Mapping[Place, Any]], Trace],
    again: Callable[[], Trace],
    sizes: Sizes,
) -> Trace:
    """Record one way, with numbers in attributes as values that are passed in.

    Where the trace says something else than the model does at other numbers, they stay constants:
    Python has made something of them that cannot be followed (`math.sqrt(self.temperature)`).

    Args:
        model: whose forward.
        then: the numbers that change, with another value of each.
        recorded: records it, with these numbers passed in.
        again: records it once at `sizes`, as it is.
        sizes: of inputs.
    """
    able = {place: number for place, number in then.items() if can_be_put(model, place)}
    groups = [able] if len(able) < 2 else [able, *({p: n} for p, n in able.items())]
    followed: dict[Place, Any] = {}
    for group in groups:
        now = {place: place.find(model) for place in group}
        if group and _can_be_passed_in(model, now, group, recorded, again, sizes):
            followed |= now
            if group is able:
                break
    return recorded(followed)


def _can_be_passed_in(
    model: nn.Module,
    now: Mapping[Place, Any],
    then: Mapping[Place, Any],
    recorded: Callable[[Mapping[Place, Any]], Trace],
    again: Callable[[], Trace],
    sizes: Sizes,
) -> bool:
    """Whether a trace with these numbers passed in says what the model does at others."""
    try:
        trace = recorded(now)
        if not (trace.reads.outcomes or trace.numbers()):
            return False
        others = alternatives(now, then, trace.reads.outcomes)[:2]
        for numbers in (now, *others):
            passed = {name_of(place): number for place, number in numbers.items()}
            with put(model, numbers):
                found = again()
            if differs_from(found, trace, {**sizes, **passed}) is not None:
                return False
        for numbers in further(now, then, trace.reads.outcomes) if others else ():
            if not _is_as_said(model, trace, numbers, again, sizes):
                return False
    except Exception:  # with a number that the model cannot have, or one that it cannot follow
        return False
    return bool(others)


def _is_as_said(
    model: nn.Module,
    trace: Trace,
    numbers: Mapping[Place, Any],
    again: Callable[[], Trace],
    sizes: Sizes,
) -> bool:
    """Whether the model does with numbers what the trace says, if it takes them at all."""
    try:
        with put(model, numbers):
            found = again()
    except Exception:
        return True
    passed = {name_of(place): number for place, number in numbers.items()}
    return differs_from(found, trace, {**sizes, **passed}) is None
