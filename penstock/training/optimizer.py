"""An optimizer whose step runs on the workers, each on the parameters that it owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from penstock.capture.preserve import without_gradients
from penstock.errors import InputError
from penstock.training.masters import MasterWeights, restore_float32
from penstock.workers.optimizer_parts import Groups, Parts, move_state

T = TypeVar("T")


class Divide(Protocol):
    """Divides an optimizer's parameters among the workers; see `penstock.training.dividing`."""

    @property
    def number(self) -> int:
        """Of the division: another one if workers own other parameters than before."""

    def __call__(self, kind: type[Optimizer], groups: Groups, options: Mapping[str, Any]) -> Parts:
        """The workers' parts of an optimizer."""


class Surviving(Protocol):
    """Does some work of the workers, and does it again if others had to take over."""

    def __call__(self, work: Callable[[], T], updates: bool = False) -> T:
        """What the work returns; `updates` says whether it updates parameters."""


def once(work: Callable[[], T], updates: bool = False) -> T:
    """Do some work once, whatever happens to workers."""
    return work()


class PipelineOptimizer(Optimizer):
    """Any optimizer of `torch.optim` that treats parameters one by one, stepped in parallel.

    `param_groups`, `state_dict()` and learning-rate schedulers work as with a plain optimizer over
    all parameters, and state dicts can be exchanged with one. With threads, `state` is in this
    process. With processes and ranks, `state` is with the workers: `state_dict()` copies it here.
    Changes to `state` in this process are ignored there; use `load_state_dict`.

    Supported is every class of `torch.optim` except LBFGS, and any other subclass of `Optimizer`
    that treats parameters one by one. SparseAdam needs sparse gradients, which only threads
    support. A class that needs all parameters at once, for instance the norm of all gradients,
    would see only those of one worker, and one whose steps change settings of its parameter groups
    (a counter, an estimate of the learning rate) is an error. With threads or processes, create it
    on `pipe.parameters()` instead. What steps add to the groups is not in the state dict.

    Args:
        kind: the optimizer's class.
        params: parameters, or parameter groups.
        divide: makes the workers' parts of an optimizer.
        master_weights: whether to update half-precision parameters with float32 copies, see
            `penstock.training.masters`.
        surviving: does some work, and again if other workers had to take over.
        options: arguments of `kind`.

    Raises:
        InputError: the class is LBFGS.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        divide: Divide,
        master_weights: bool = False,
        surviving: Surviving = once,
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
        self._surviving = surviving
        self._parts: Parts | None = None
        self._divided: tuple[int, list[list[int]]] = 0, []
        self._updated: Collection[torch.Tensor] = ()  # by a step that is still to be completed
        super().__init__(whole.param_groups, whole.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group` does."""
        if getattr(self, "_parts", None) is not None:
            self._surviving(self._fetch)
        super().add_param_group(param_group)
        self._parts = None

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an optimizer of a pipeline cannot be copied or pickled, because its parts are with "
            "the workers; save optimizer.state_dict()"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; each worker updates those that it owns.

        Threads leave small parameters to the first of them, which is faster.

        Args:
            closure: called first, with gradients enabled.

        Returns:
            what the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._surviving(self._step, updates=True)
        return loss

    def _step(self) -> None:
        """Update the parameters that are still to be updated."""
        groups = [[id(p) for p in group["params"]] for group in self.param_groups]
        divided = self._divide.number, groups
        if self._parts is not None and divided != self._divided:  # or the script has edited them
            self._parts.fetch(self.state)
            self._parts = None
        if self._parts is None:
            parts = self._divide(self._kind, self.param_groups, self._options)
            move_state(self.param_groups, self.state)
            parts.load(self.state)
            self._parts, self._divided = parts, divided  # only now: a Ctrl-C may come before
        with without_gradients(self._updated):
            if not self._updated or self._has_gradients():  # else it was completed before
                self._parts.step(self.param_groups, self.state, self._redo_step)
        self._updated = ()

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.param_groups for p in group["params"])

    def _redo_step(self, groups: Groups) -> None:
        """Repeat a step that was lost with the workers that had done it.

        Args:
            groups: the parameter groups as they were in that step.
        """
        now, self.param_groups = self.param_groups, [dict(group) for group in groups]
        try:
            with torch.no_grad():
                self._step()
        finally:
            self.param_groups = now

    def divide_again(self) -> None:
        """Bring the state here: the next step divides it among the workers that there are then."""
        if self._parts is not None:
            self._updated = [*self._updated, *self._parts.updated]
            self._parts.fetch(self.state)
            self._parts = None

    def load_again(self) -> None:
        """What the workers remember is lost: the next step loads the state that is here."""
        self._parts = None

    @property
    def remote(self) -> Parts | None:
        """The workers' parts, if the state is in worker processes; otherwise `None`."""
        parts = self._parts
        if parts is None or parts.number is None:
            return None
        if self._divided[0] != self._divide.number:  # they are no longer those of these workers
            self.divide_again()
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain optimizer over all parameters, copied from the workers."""
        self._surviving(self._fetch)
        return super().state_dict()

    def _fetch(self) -> None:
        if self._parts is not None:
            self._parts.fetch(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an optimizer of this class, also of a plain one."""
        self._surviving(lambda: self._load(state_dict))

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._fetch()  # if workers have died, others first repeat the steps with the old state
        super().load_state_dict(state_dict)
        self._read_as_its_class_does()
        if self._kind is MasterWeights:
            restore_float32(self, state_dict)
        parts, self._parts = self._parts, None
        if parts is not None and self._divided[0] == self._divide.number:
            parts.load(self.state)  # if that is given up, the next step loads all of it
            self._parts = parts

    def _read_as_its_class_does(self) -> None:
        """Bring state that older versions of PyTorch have written up to date: counts of steps."""
        options = dict(self._options)
        kind = options.pop("master_of") if self._kind is MasterWeights else self._kind
        if kind.__setstate__ is not Optimizer.__setstate__:
            reader = kind([dict(group) for group in self.param_groups], **options)
            reader.__setstate__({"state": self.state, "param_groups": self.param_groups})
