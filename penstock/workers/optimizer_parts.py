"""An optimizer in parts: each worker updates the parameters that it owns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import InputError, PenstockError, WorkerError
from penstock.interrupts import is_interrupt
from penstock.links.local import Aborted

Groups = Sequence[Mapping[str, Any]]
State = dict[torch.Tensor, Any]

_SMALL = 32 * 1024  # bytes of a parameter, on average


class Parts(Protocol):
    """The parts of one optimizer, wherever they are."""

    @property
    def updated(self) -> Collection[torch.Tensor]:
        """Parameters that were updated by a step that the workers did not complete."""

    @property
    def number(self) -> int | None:
        """The number of the optimizer in worker processes; `None` if its state is here."""

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Update every parameter, with the settings that these groups have now.

        Args:
            groups: the optimizer's parameter groups.
            state: the optimizer's state in this process.
            redo: does the step again, for the groups that it is given, with the parts that there
                are then; called if workers that did this step are lost.
        """

    def fetch(self, state: State) -> None:
        """Replace `state` by what the parts remember."""

    def load(self, state: State) -> None:
        """Replace what the parts remember by `state`."""


class LocalParts:
    """Parts in this process, which share the optimizer's own state.

    Args:
        kind: the optimizer's class.
        groups: the parameter groups.
        options: arguments of `kind`.
        owners: for every worker the parameters that it owns.
        run: runs one job on each worker.
    """

    number = None
    updated: Collection[torch.Tensor] = ()

    def __init__(
        self,
        kind: type[Optimizer],
        groups: Groups,
        options: Mapping[str, Any],
        owners: Sequence[Sequence[nn.Parameter]],
        run: Callable[[Sequence[Callable[[], Any]]], Any],
    ) -> None:
        self._parts = [part_of(kind, groups, options, owned) for owned in owners]
        self._in_turn = _are_small(groups)
        self._run = run

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Run the step of every part on its worker, or, if parameters are small, all on the first.

        An operation on a small tensor takes less time than threads take to pass on the
        interpreter, which each of them needs before it and after it.
        """
        warn_of_no_gradients(groups)
        for part in self._parts:
            part.state = state  # type: ignore[assignment]
        settings = settings_of(groups)
        steps = [partial(_step, worker, part, settings) for worker, part in enumerate(self._parts)]
        if self._in_turn:
            steps = [partial(_each, steps), *[partial(_each, ())] * (len(steps) - 1)]
        self._run(steps)

    def fetch(self, state: State) -> None:
        """Do nothing: parts in this process write into `state` itself."""

    def load(self, state: State) -> None:
        """Do nothing: the parts get `state` with the next step."""


def _are_small(groups: Groups) -> bool:
    """Whether the steps of parts are faster one after the other: small parameters, all on CPUs.

    If many are updated by one operation (`fused` and `foreach`), threads need the interpreter
    rarely.
    """
    parameters: list[torch.Tensor] = [p for group in groups for p in group["params"]]
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return False
    if any(group.get("fused") or group.get("foreach") for group in groups):
        return False
    return sum(parameter.nbytes for parameter in parameters) < _SMALL * len(parameters)


def _each(jobs: Sequence[Callable[[], None]]) -> None:
    """Do one job after the other."""
    for job in jobs:
        job()


def _step(worker: int, part: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """The step of a part.

    Raises:
        WorkerError: it failed.
    """
    try:
        step_part(part, settings)
    except BaseException as error:  # a sys.exit() must not end the caller
        if is_interrupt(error):
            raise
        raise step_failed(error, worker) from error


def part_of(
    kind: type[Optimizer],
    groups: Groups,
    options: Mapping[str, Any],
    owned: Sequence[torch.Tensor],
) -> Optimizer:
    """The optimizer of one worker: the same groups, with just the parameters it owns."""
    return kind(own_groups(groups, owned), **options)


def own_groups(groups: Groups, owned: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """The groups, with just these parameters."""
    mine = {id(p) for p in owned}
    return [{**group, "params": [p for p in group["params"] if id(p) in mine]} for group in groups]


def settings_of(groups: Groups) -> list[dict[str, Any]]:
    """The settings of the groups: all that is in them but the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def as_they_are(groups: Groups) -> list[dict[str, Any]]:
    """The groups as they are now, whatever is changed in them later."""

    def kept(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    return [
        {k: list(v) if k == "params" else kept(v) for k, v in group.items()} for group in groups
    ]


def step_part(part: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Update the parameters of a part, with these settings in its groups.

    Raises:
        InputError: the step has changed a setting, which is set back before the next one. What it
            had not been given (`None`, or nothing) it may use for itself.
    """
    for own, given in zip(part.param_groups, settings, strict=True):
        own.update(given)
    before = [dict(own) for own in part.param_groups]
    part.step()
    for own, given in zip(part.param_groups, before, strict=True):
        changed = [k for k, v in given.items() if v is not None and not _is_same(own.get(k), v)]
        if changed:
            raise InputError(
                f"{type(part).__name__}.step() has changed {changed[0]!r} of its parameter groups. "
                "Its parts on the workers do not keep that, so it cannot be divided among them. "
                f"Create it on pipe.parameters() instead, with threads or processes: "
                f"{type(part).__name__}(pipe.parameters(), ...)"
            )


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) is not torch.Tensor and now == before)


def move_state(groups: Groups, state: State) -> None:
    """Move an optimizer's state to the devices where the parameters are now.

    As with `Optimizer.load_state_dict`, counts of steps stay where they are unless a kernel uses
    them (`capturable` or `fused`).

    Args:
        groups: the optimizer's parameter groups.
        state: the optimizer's state, which is changed.
    """
    for group in groups:
        counts_move = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            own = state.get(parameter, {})
            for name, value in own.items():
                moves = isinstance(value, torch.Tensor) and (name != "step" or counts_move)
                if moves and value.device != parameter.device:
                    own[name] = value.to(parameter.device)


def warn_of_no_gradients(groups: Groups) -> None:
    """Say so if a step would do nothing, because somebody has cleared what `train_step` left."""
    trained = (p for group in groups for p in group["params"] if p.requires_grad)
    if (first := next(trained, None)) is None or first.grad is not None:
        return
    if all(p.grad is None for p in trained):
        warnings.warn(
            "optimizer.step() finds no gradient and changes nothing: no train_step or backward "
            "came before it, or the gradients were cleared. (train_step includes the backward; a "
            "trainer must clear gradients before it, not between the training step and its own "
            "backward. See docs/frameworks.md)",
            stacklevel=2,
        )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all its groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def step_failed(error: BaseException, worker: int) -> BaseException:
    """The error for a step of an optimizer that some workers may have done."""
    if isinstance(error, PenstockError | Aborted):
        return error
    named = WorkerError(None, None, "optimizer step", error, worker)
    named.__traceback__ = error.__traceback__
    return named
