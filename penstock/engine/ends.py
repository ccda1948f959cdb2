"""The two ends of a pipeline: the batch that feeds it, and the loss or result that it ends in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.engine.span import Gradients, Roots, Values, edges
from penstock.errors import InputError

Assemble = Callable[[int, Values], Any]
"""Puts a micro-batch's result together, in the model's structure, from the last stage's values."""


class LossFailed(Exception):  # noqa: N818 - never reaches a user: it tells loss from forward
    """The loss function failed; the cause is chained."""


class Feed:
    """The source of the first stage: the micro-batches of a batch.

    Attributes:
        values: for every micro-batch the values that enter; set before a pass.
        gradients: for every micro-batch the gradients of those values, after a backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def receive(self, microbatch: int) -> Values:
        """The values of a micro-batch; they are there already, on whatever device."""
        return tuple(to_device(value, self._device) for value in self.values[microbatch])

    def send_gradients(self, microbatch: int, gradients: Gradients) -> None:
        """Keep the gradients, for inputs that have some."""
        if any(g is not None for g in gradients):
            self.gradients[microbatch] = gradients

    def clear(self) -> None:
        """Let go of the batch."""
        self.values: list[Values] = []
        self.gradients: dict[int, Gradients] = {}


class Outlet:
    """The sink of the last stage: it collects results, or turns them into losses at once.

    Attributes:
        results: what the last stage gave, by micro-batch, without history.
        gradients: the gradients of those results, for the backward.
        losses: the detached loss of every micro-batch, unweighted.
    """

    def __init__(self, assemble: Assemble) -> None:
        self._assemble = assemble
        self._loss: Loss | None = None
        self.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self.begin(None, {})

    def begin(self, loss: Loss | None, gradients: Mapping[int, Gradients]) -> None:
        """From now on collect results, or turn them into losses if there is a loss.

        Args:
            loss: the step's.
            gradients: of results that were collected before, for their backward.
        """
        self.results: dict[int, Values] = {}
        self.gradients: dict[int, Gradients] = dict(gradients)
        self.losses: dict[int, torch.Tensor] = {}
        self._loss = loss

    def send(self, microbatch: int, results: Values) -> Roots:
        """Keep the results, or the loss of them."""
        if self._loss is None:
            self.results[microbatch] = tuple(_without_history(r) for r in results)
            return edges(results)
        loss, weight = self._loss.of(microbatch, results, self._assemble)
        self.losses[microbatch] = loss.detach()
        self.gradients[microbatch] = [weight]
        return edges((loss,))

    def receive_gradients(self, microbatch: int) -> Gradients:
        """The gradients of what was sent; they are there already."""
        return self.gradients.pop(microbatch)


class Loss:
    """A step's loss: the user's function, the targets, and the weight of each micro-batch.

    Args:
        function: the user's.
        targets: of every micro-batch.
        weights: of the micro-batches' losses in the batch's.
        scale: what the loss is multiplied by before its backward; `None` without loss scaling.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        targets: Sequence[tuple[Any, ...]],
        weights: Sequence[float],
        scale: float | None = None,
    ) -> None:
        self.function = function
        self.targets = targets
        self.weights = weights
        self.scale = scale

    def of(
        self, microbatch: int, results: Values, assemble: Assemble
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, and its weight, scaled, as the gradient to start from.

        Raises:
            LossFailed: the function raised, or returned something else than a scalar tensor.
        """
        try:
            output = assemble(microbatch, results)
            loss = self.function(output, *self.targets[microbatch])
            _check_scalar(loss)
        except BaseException as error:  # a sys.exit() as well
            raise LossFailed from error
        return loss, self._start(loss, self.weights[microbatch])

    def _start(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """The gradient of `loss` in `loss * weight * scale`, in the bits of autograd."""
        if self.scale is None:
            return torch.full_like(loss, weight)
        scale = torch.full_like(loss, self.scale, dtype=torch.float32)
        return scale.to(loss.dtype) * weight


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"the loss function returned a {type(loss).__name__}, not a scalar tensor; "
            "loss_fn(output, target) must return one number that can be differentiated"
        )
    if loss.numel() != 1:
        raise InputError(
            f"the loss has shape {tuple(loss.shape)}, but a scalar is needed to differentiate; "
            "reduce it, with .mean() for instance"
        )
    if not loss.requires_grad:
        raise InputError(
            "the loss depends on no parameter that requires a gradient; was it detached?"
        )


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor on `device`, everything else as it is."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _without_history(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
