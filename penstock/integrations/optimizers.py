"""An optimizer that a framework or its user has created, stepped by the workers of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import InputError
from penstock.pipeline import Pipeline
from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.optimizer_parts import move_state, parameters_of

Find = Callable[[Sequence[torch.Tensor]], Pipeline]
"""The pipeline that has these parameters."""


class Divided:
    """An optimizer whose steps are done by the workers of a pipeline, each for what it owns.

    It stays the same object with the same groups, so schedulers and wrappers of it go on working.
    Its `step` and `state_dict` are those of a `PipelineOptimizer` from its first step on, with the
    hooks that are registered on it.

    Args:
        optimizer: of a class of `torch.optim`, over parameters of one pipeline.
        find: returns the pipeline of some parameters; called in the first step, after its closure,
            which may build the pipeline.

    Raises:
        InputError: an optimizer of another package, or LBFGS.
    """

    def __init__(self, optimizer: Optimizer, find: Find) -> None:
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim") or kind is torch.optim.LBFGS:
            raise InputError(
                f"the optimizer {kind.__module__}.{kind.__name__} cannot be divided among ranks: "
                'use a class of torch.optim except LBFGS, or workers="processes", which steps any '
                "optimizer in this process"
            )
        self._optimizer = optimizer
        self._find = find
        self._parts: PipelineOptimizer | None = None
        self._state_dict, self._load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self._own_step = vars(optimizer).get("step")  # a scheduler has put it there

        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        hooked = Optimizer.profile_hook_step(step)  # as torch does with the step of every class
        vars(hooked).update(vars(getattr(optimizer.step, "__func__", optimizer.step)))
        vars(optimizer).update(
            step=MethodType(hooked, optimizer),
            state_dict=self._states,
            load_state_dict=self._load,
        )

    def gather(self) -> None:
        """Make it a plain optimizer again, with the state from all ranks, which all call this."""
        self._fetch()
        for name in ("step", "state_dict", "load_state_dict"):
            vars(self._optimizer).pop(name, None)
        if self._own_step is not None:
            vars(self._optimizer).update(step=self._own_step)
        move_state(self._optimizer.param_groups, self._optimizer.state)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers ask for it
        if self._parts is None:
            pipe = self._find(parameters_of(optimizer))
            self._parts = pipe.optimizer(type(optimizer), optimizer.param_groups)
            self._parts.state = optimizer.state  # one for both, in which each rank has its part
        self._parts.param_groups = optimizer.param_groups
        self._parts.step()
        return loss

    def _states(self) -> dict[str, Any]:
        self._fetch()
        return self._state_dict()

    def _fetch(self) -> None:
        """Bring the state from all ranks here."""
        if self._parts is not None:
            self._parts.param_groups = self._optimizer.param_groups
            self._parts.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict(state_dict)
        self._parts = None  # the next step divides what was loaded
