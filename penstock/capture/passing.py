"""Records a way through a model with numbers that change passed in as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.capture.calls import Sizes, Trace
from penstock.capture.numbers import (
    Given,
    Numeric,
    Where,
    alternatives,
    can_be_put,
    found,
    further,
    name_of,
    put,
)
from penstock.capture.sizes import differs_from


def passing_in(
    model: nn.Module,
    leaves: list[Any],
    then: Mapping[Where, Numeric],
    recorded: Callable[[Mapping[Where, Numeric]], Trace],
    again: Callable[[], Trace],
    sizes: Sizes,
) -> Trace:
    """Record one way, with numbers in attributes and arguments as values that are passed in.

    All numbers are tried together, and one by one if that fails. A number stays a constant if the
    trace does not say what the model does with other values of it, because Python has made
    something of it that cannot be followed (`math.sqrt(self.temperature)`).

    Args:
        model: the model whose forward is recorded.
        leaves: the leaves of the inputs.
        then: the numbers that change, each with another value than it has now.
        recorded: records the forward with these numbers passed in.
        again: records the forward once at `sizes`, with all numbers as constants.
        sizes: the sizes of the inputs.
    """
    able = {place: number for place, number in then.items() if can_be_put(model, place)}
    groups = [able] if len(able) < 2 else [able, *({p: n} for p, n in able.items())]
    followed: dict[Where, Numeric] = {}
    for group in groups:
        now = {place: found(model, leaves, place) for place in group}
        attempt = _Attempt(model, leaves, now, recorded, again, sizes)
        if group and attempt.succeeds(group):
            followed |= now
            if group is able:
                break
    return recorded(followed)


@dataclass(frozen=True)
class _Attempt:
    """An attempt to pass some numbers in.

    Attributes:
        model, leaves, recorded, again, sizes: see `passing_in`.
        now: the numbers with their present values.
    """

    model: nn.Module
    leaves: list[Any]
    now: Mapping[Where, Numeric]
    recorded: Callable[[Mapping[Where, Numeric]], Trace]
    again: Callable[[], Trace]
    sizes: Sizes

    def succeeds(self, then: Mapping[Where, Numeric]) -> bool:
        """Whether a trace with these numbers passed in says what the model does at other values.

        Args:
            then: the numbers, each with another value.
        """
        try:
            trace = self.recorded(self.now)
            outcomes = trace.reads.outcomes
            unused = not (outcomes or trace.numbers())
            if unused and not all(isinstance(where, Given) for where in self.now):
                return False
            others = alternatives(self.now, then, outcomes)[:2]
            if not all(self._is_as_traced(trace, numbers) for numbers in (self.now, *others)):
                return False
            for numbers in further(self.now, then, outcomes) if others else ():
                if not self._is_as_traced(trace, numbers, or_refused=True):
                    return False
        except Exception:  # the model refuses a value, or a number cannot be followed
            return False
        return bool(others)

    def _is_as_traced(
        self, trace: Trace, numbers: Mapping[Where, Numeric], or_refused: bool = False
    ) -> bool:
        """Whether the model does with numbers what the trace says.

        Args:
            trace: a recording with these numbers passed in.
            numbers: the numbers, with the values to compare at.
            or_refused: whether it also counts as a yes if the model raises an exception.
        """
        try:
            with put(self.model, self.leaves, numbers):
                once_more = self.again()
        except Exception:
            if or_refused:
                return True
            raise
        passed: dict[str, Any] = {name_of(place): number for place, number in numbers.items()}
        return differs_from(once_more, trace, {**self.sizes, **passed}) is None
