"""An optimizer whose step runs on all workers at once, each on the parameters that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import InputError
from penstock.training.masters import MasterWeights, restore_float32
from penstock.workers.optimizer_parts import Groups, Parts

Divide = Callable[[type[Optimizer], Groups, Mapping[str, Any]], Parts]


class PipelineOptimizer(Optimizer):
    """Any optimizer of `torch.optim` that treats parameters one by one, stepped in parallel.

    `param_groups`, `state_dict()` and learning-rate schedulers are those of a plain optimizer over
    all parameters; a checkpoint of one loads into the other. `state` is where the parameters are:
    with threads it is here, of worker processes and other ranks it is brought here by
    `state_dict()`, and what is written to it there is not seen; `load_state_dict` is.

    Every class of `torch.optim` but LBFGS is such a one, Muon (for matrices) and Adafactor too.
    SparseAdam needs sparse gradients, which only threads can have. A class of one's own that looks
    at all parameters at once, at the norm of all gradients for instance, would see those of one
    worker; have it step on `pipe.parameters()` itself with threads or processes.

    Args:
        kind: the optimizer's class.
        params: parameters, or parameter groups.
        divide: makes the parts of an optimizer of this class, with these groups and options.
        master_weights: whether parameters in half precision are updated by float32 copies of
            them, see `penstock.training.masters`.
        options: arguments of `kind`.

    Raises:
        InputError: the class needs a closure, and so a step of its own through the pipeline.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        divide: Divide,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        if issubclass(kind, torch.optim.LBFGS):
            raise InputError(
                "LBFGS evaluates the model several times within one step and sees all parameters "
                "at once, so it cannot be divided among workers; use AdamW or SGD"
            )
        if master_weights:
            options = {"master_of": kind, **options}
            kind = MasterWeights
        whole = kind(params, **options)
        self._kind = kind
        self._options = options
        self._divide = divide
        self._parts: Parts | None = None
        self._divided: list[list[int]] = []
        super().__init__(whole.param_groups, whole.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in plain optimizers; its parameters are divided among the workers."""
        if getattr(self, "_parts", None) is not None:
            self._parts.fetch(self.state)  # type: ignore[union-attr]
        super().add_param_group(param_group)
        self._parts = None

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles would have; there can be none.

        Raises:
            TypeError: in any case.
        """
        raise TypeError(
            "an optimizer of a pipeline cannot be copied or pickled, as its parts are with the "
            "workers; save optimizer.state_dict()"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; a closure is called first, as in plain optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[id(p) for p in group["params"]] for group in self.param_groups]
        if self._parts is not None and groups != self._divided:  # the script has edited them
            self._parts.fetch(self.state)
            self._parts = None
        if self._parts is None:
            parts = self._divide(self._kind, self.param_groups, self._options)
            parts.load(self.state)
            self._parts, self._divided = parts, groups  # only now: a Ctrl-C may come before
        self._parts.step(self.param_groups, self.state)
        return loss

    @property
    def remote(self) -> Parts | None:
        """Its parts, if they have its state in worker processes."""
        parts = self._parts
        return parts if parts is not None and parts.number is not None else None

    def state_dict(self) -> dict[str, Any]:
        """What a plain optimizer over all parameters would have, and can load."""
        if self._parts is not None:
            self._parts.fetch(self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of this class, from here or from plain PyTorch."""
        super().load_state_dict(state_dict)
        if self._kind is MasterWeights:
            restore_float32(self, state_dict)
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.load(self.state)  # if that is interrupted, the next step loads all of it
            self._parts = parts
