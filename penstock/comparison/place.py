"""Where a difference between a pipeline and one device arises: the first place in the forward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from penstock.capture import Attribute, Key, Program, Trace
from penstock.capture.equality import same_tensor
from penstock.capture.listening import forward_heard, replay_heard
from penstock.comparison.reference import copied, run_with_threads
from penstock.comparison.verify_report import Comparison, Place, gap
from penstock.devices.choice import threads_per_worker
from penstock.oracle import Oracle
from penstock.plan import Plan

T = TypeVar("T")


def place_of(
    model: nn.Module,
    program: Program,
    oracle: Oracle,
    plan: Plan,
    comparisons: Sequence[Comparison],
) -> Place | None:
    """The first place where something differs.

    Args:
        model: a fresh copy of the user's, which is run.
        program: captured from another copy.
        oracle: what has run it unsplit.
        plan: how it was split.
        comparisons: what was compared; something in them differs.
    """
    if not model.training:
        model.train()
    trace = program.train
    ends = [stage.calls[1] for stage in plan.stages]

    def stage_of(call: int) -> int:
        return min(bisect_right(ends, call), len(ends) - 1)

    threads = threads_per_worker(plan.devices)
    found = run_with_threads(partial(_first_call, program, oracle, copied(model), model), threads)
    if found is not None:
        microbatch, call, largest = found
        label = trace.calls[call].label
        return Place(stage_of(call), call, label, microbatch, largest=largest)
    uses = users(trace)
    differing = [name for c in comparisons for name in c.different if name in uses]
    if not differing:
        return None
    name = min(differing, key=lambda n: uses[n][0])
    last = max(differing, key=lambda n: uses[n][-1])
    end = None if last == name else f"{last} (call {uses[last][-1]})"
    call = uses[name][0]
    return Place(stage_of(call), call, trace.calls[call].label, parameter=name, last=end)


def users(trace: Trace) -> dict[str, list[int]]:
    """The calls that use a parameter or buffer, by its name."""
    found: dict[str, list[int]] = {}
    for number, call in enumerate(trace.calls):
        read = [value.name for value in call.reads() if isinstance(value, Attribute)]
        for name in dict.fromkeys([*read, *call.hidden]):
            found.setdefault(name, []).append(number)
    return found


def in_forward_order(trace: Trace, named: Mapping[str, T]) -> dict[str, T]:
    """The same, by when the forward uses it first; what it does not use comes last."""
    uses = users(trace)
    never = [len(trace.calls)]
    return {name: named[name] for name in sorted(named, key=lambda n: uses.get(n, never)[0])}


def _first_call(
    program: Program, oracle: Oracle, ours: nn.Module, theirs: nn.Module
) -> tuple[int, int, float] | None:
    """The first call that gives something else in a replay than in the model's own forward.

    Both run the micro-batches of a step in order, so that what one leaves in buffers is there for
    the next.

    Returns:
        the number of the micro-batch, that of the call, and the largest absolute difference.
    """
    for microbatch, (args, kwargs) in enumerate(oracle.microbatches):
        key = Key(torch.initial_seed(), 0, microbatch)
        expected = forward_heard(program, theirs, args, kwargs, key)
        replayed = replay_heard(program, ours, args, kwargs, key)
        for number, call in enumerate(program.train.calls):
            pairs = zip(
                replayed.get(call.identity, ()), expected.get(call.identity, ()), strict=False
            )
            gaps = [gap(a, b) for a, b in pairs if not same_tensor(a, b)]
            if gaps:
                return microbatch, number, max(gaps)
    return None
