"""Losses of a whole batch, which wait for the results of all of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from penstock.capture.randomness import LOSS, METRICS, Key, Watched
from penstock.capture.trees import map_leaves, tree_leaves, without_history
from penstock.engine.ends import check_scalar, gradient_of, to_device
from penstock.engine.objective import Objective
from penstock.engine.user_functions import callable_as
from penstock.errors import InputError


class WholeBatch:
    """A loss function of a whole batch, see `whole_batch`.

    Calling it calls the function, so that it can be used without a pipeline as well.

    Attributes:
        function: the user's.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the function returns."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"penstock.whole_batch({self.function!r})"


def whole_batch(loss_fn: Callable[..., torch.Tensor]) -> WholeBatch:
    """Mark a loss function that must see all rows of a batch at once.

    `train_step` calls a loss function once per micro-batch. That is the loss of the batch for a
    mean or a sum over rows, but not for one that compares rows with each other: contrastive losses
    with in-batch negatives, or statistics of the batch. `pipe.train_step(x, target=y,
    loss_fn=ps.whole_batch(fn))` runs all forwards, calls `fn(output, target)` once with the model's
    result for the batch as `pipe(x)` returns it, and then runs all backwards. The gradients are
    bitwise those of one device that does the same.

    The activations of all micro-batches are held at once. Build the pipeline with
    `schedule="gpipe"`, so that the plan counts this memory, and with `recompute="all"` if it is
    too much.

    The function is called in the thread or rank that calls `train_step`; what it raises is raised
    there as it is, with `.grad` untouched. As in PyTorch, buffers such as running statistics then
    are as the forwards left them. Random numbers that it draws are seeded by the step, as those of
    other loss functions are. It may use parameters of its own.

    Example::

        def info_nce(z, temperature=0.1):
            a, b = F.normalize(z, dim=-1).chunk(2, dim=1)  # two views of each row
            similarity = a.flatten(1) @ b.flatten(1).t() / temperature
            return F.cross_entropy(similarity, torch.arange(len(z), device=z.device))

        loss = pipe.train_step(x, loss_fn=ps.whole_batch(info_nce))

    Args:
        loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` if there is no target. Must return
            a scalar tensor.

    Returns:
        a function for `loss_fn=` of `train_step`, `eval_step` and `verify`.

    Raises:
        InputError: it is not a function.
    """
    if isinstance(loss_fn, WholeBatch):
        return loss_fn
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise InputError(
            f"whole_batch({loss_fn!r}): give a function of (output, target), or an object of a "
            "loss class such as torch.nn.CrossEntropyLoss()"
        )
    return WholeBatch(loss_fn)


class WholeObjective:
    """What a step makes of the result of a whole batch.

    Args:
        objective: the arguments of the step.
        loss_fn: the loss function among them.

    Attributes:
        objective: these arguments, with the user's own function as `loss_fn`.

    Raises:
        InputError: `weight` or `outputs` has a value that has no meaning for a whole batch.
    """

    def __init__(self, objective: Objective, loss_fn: WholeBatch) -> None:
        if objective.weight != "rows":
            raise InputError(
                f"weight={objective.weight!r} combines the losses of micro-batches, and "
                "whole_batch computes one loss of all of them: leave weight= out"
            )
        if objective.outputs not in (True, False):
            raise InputError(
                f"outputs={objective.outputs!r}: with whole_batch the result is put together for "
                "the loss, so give outputs=True, or Pipeline(merge=) for another form"
            )
        self.objective = replace(objective, loss_fn=loss_fn.function)

    def loss(self, key: Key, output: Any, device: torch.device) -> torch.Tensor:
        """The loss, with its history.

        Args:
            key: of the random numbers of the first micro-batch.
            output: the model's result for the batch.
            device: where targets are wanted.

        Raises:
            InputError: the function is none, takes other arguments, or returns no scalar.
        """
        target = self._target(device)
        more = self.objective.loss_kwargs or {}
        function = callable_as("loss_fn", self.objective.loss_fn, bool(target), more)
        more = {name: _on(device, value) for name, value in more.items()}
        loss = Watched(function)(key, LOSS, output, *target, **more)
        check_scalar(loss)
        return loss  # type: ignore[no-any-return]

    def measured(self, key: Key, output: Any, device: torch.device) -> list[Any]:
        """What the metrics function says of the batch, in a list; empty if there is none."""
        if self.objective.metrics is None:
            return []
        target = self._target(device)
        function = callable_as("metrics", self.objective.metrics, bool(target), {})
        output = map_leaves(without_history, output)
        with torch.no_grad():
            found = Watched(function)(key, METRICS, output, *target)
        return [map_leaves(without_history, found)]

    def start(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient from which the backward starts."""
        return gradient_of(loss, 1.0, self.objective.scale)

    def _target(self, device: torch.device) -> tuple[Any, ...]:
        target = self.objective.target
        return () if target is None else (_on(device, target),)


def stand_in(output: Any) -> torch.Tensor:
    """Something to differentiate, in a process whose loss does not count.

    Args:
        output: the model's result, a leaf of which requires a gradient.
    """
    leaves = tree_leaves(output)
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return own[0].sum()


def _on(device: torch.device, value: Any) -> Any:
    return map_leaves(lambda leaf: to_device(leaf, device), value)
