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
        super().__init__(whole.param_groups, whole.defaults)
        self._run = run
        self._parts = [
            part for owned in owners if (part := _part(kind, whole, owned, options)) is not None
        ]
        self._idle = len(owners) - len(self._parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; a closure is called first, as in plain optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.state = self.state
            for own, shared in zip(part.param_groups, self.param_groups, strict=True):
                own.update({k: v for k, v in shared.items() if k != "params"})
        self._run([*(part.step for part in self._parts), *[_nothing] * self._idle])
        return loss


def _part(
    kind: type[Optimizer], whole: Optimizer, owned: Sequence[nn.Parameter], options: dict[str, Any]
) -> Optimizer | None:
    """The optimizer of one worker: the same groups, with just its own parameters."""
    mine = {id(p) for p in owned}
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) in mine]}
        for group in whole.param_groups
    ]
    if not any(group["params"] for group in groups):
        return None
    return kind(groups, **options)


def _nothing() -> None:
    """What a worker that owns no parameter does in a step."""
