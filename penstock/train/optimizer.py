"""An optimizer whose step runs on all workers at once, each on the parameters that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import InputError

RunJobs = Callable[[Sequence[Callable[[], Any]]], Any]


class PipelineOptimizer(Optimizer):
    """Any optimizer of `torch.optim` that treats parameters one by one, stepped in parallel.

    `param_groups`, `state`, `state_dict()` and learning-rate schedulers are those of a plain
    optimizer over all parameters; a checkpoint of one loads into the other.

    Args:
        kind: the optimizer's class.
        params: parameters, or parameter groups.
        owners: for every worker the parameters that it owns.
        run: runs one job on each worker.
        options: arguments of `kind`.

    Raises:
        InputError: the class needs a closure, and so a step of its own through the pipeline.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        owners: Sequence[Sequence[nn.Parameter]],
        run: RunJobs,
        **options: Any,
    ) -> None:
        if issubclass(kind, torch.optim.LBFGS):
            raise InputError(
                "LBFGS evaluates the model several times within one step and sees all parameters "
                "at once, so it cannot be divided among workers; use AdamW or SGD"
            )
        whole = kind(params, **options)
        self._kind = kind
        self._options = options
        self._owners = owners
        self._run = run
        self._parts: list[Optimizer] = []
        super().__init__(whole.param_groups, whole.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in plain optimizers; its parameters are divided among the workers."""
        super().add_param_group(param_group)
        self._parts = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; a closure is called first, as in plain optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._parts:
            self._parts = [self._part(owned) for owned in self._owners]
        for part in self._parts:
            part.state = self.state
            for own, shared in zip(part.param_groups, self.param_groups, strict=True):
                own.update({k: v for k, v in shared.items() if k != "params"})
        self._run([part.step for part in self._parts])
        return loss

    def _part(self, owned: Sequence[nn.Parameter]) -> Optimizer:
        """The optimizer of one worker: the same groups, with just the parameters it owns."""
        mine = {id(p) for p in owned}
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in mine]}
            for group in self.param_groups
        ]
        return self._kind(groups, **self._options)
