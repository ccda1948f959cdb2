"""Compiles one worker's list of actions to bound callables, once; a step just calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.engine.stage import Stage
from penstock.schedule import Action, Kind

Run = Callable[[], None]


def compile_actions(
    actions: Sequence[Action], stages: Mapping[int, Stage], train: bool
) -> list[Run]:
    """What a worker runs: for every action first the wait for its values, then the work.

    Args:
        actions: the worker's list, in order.
        stages: the worker's at least, by number.
        train: whether forwards keep what a backward needs.

    Returns:
        two callables for every action.
    """
    runs: list[Run] = []
    for kind, index, microbatch in actions:
        stage = stages[index]
        if kind is Kind.FORWARD:
            work = stage.forward if train else stage.infer
            runs += [partial(stage.await_values, microbatch), partial(work, microbatch)]
        elif kind is Kind.WEIGHT:
            runs += [_wait_for_nothing, partial(stage.weight_backward, microbatch)]
        else:  # the halves differ in the stage's modules
            work = stage.backward
            runs += [partial(stage.await_gradients, microbatch), partial(work, microbatch)]
    return runs


def _wait_for_nothing() -> None:
    """The weight half follows its input half on the same worker."""
