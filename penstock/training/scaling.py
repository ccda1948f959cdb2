"""Loss scaling for float16: torch's own scaler, with one verdict on all workers' gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from penstock.errors import InputError
from penstock.training.optimizer import Surviving, once
from penstock.workers.backend import Workers
from penstock.workers.optimizer_parts import parameters_of

Found = dict[torch.device, torch.Tensor]
"""For every device a scalar that is more than 0 if there is a gradient with an inf or a nan."""


class PipelineScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a pipeline: `scale`, `unscale_`, `step`, `update` as in torch.

    There is one scale. A step in which any stage has a gradient with an inf or a nan is left out by
    all workers. Under torchrun every rank calls every method, and all have the same scale
    afterwards.

    Args:
        device: of the pipeline's last stage; the scale is there.
        workers: the pipeline's workers; `go_on` replaces them after a change.
        surviving: does some work of the workers, and repeats it if others had to take over.
        **options: those of `torch.amp.GradScaler`, `init_scale` and so on.

    Raises:
        InputError: torch does not take these options.
    """

    def __init__(
        self,
        device: torch.device,
        workers: Workers,
        surviving: Surviving = once,
        **options: Any,
    ) -> None:
        self._surviving = surviving
        try:
            super().__init__(device.type, **options)
            self._home = device
            self.begin()
        except (AssertionError, TypeError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise InputError(
                f"torch.amp.GradScaler does not take {given}: {error}. It takes init_scale, "
                "growth_factor above 1, backoff_factor below 1, growth_interval and enabled"
            ) from error
        self.workers = workers

    def go_on(self, device: torch.device, workers: Workers) -> None:
        """Go on with other workers, and with the scale where their last stage is.

        Args:
            device: of the last stage.
            workers: that there are now.
        """
        self._home, self.workers, self._device = device, workers, device.type
        for name in ("_scale", "_growth_tracker"):
            found = getattr(self, name, None)  # there are none if scaling is off
            if found is not None:
                setattr(self, name, found.to(device))

    def begin(self) -> float | None:
        """The scale of the next backward; `None` if scaling is off."""
        if not self._enabled:
            return None
        if self._scale is None:  # on a rank that has no loss, too
            self._lazy_init_scale_growth_tracker(self._home)
        return self.get_scale()

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Found:
        with self.workers.operation("unscale_"):
            _check_dtype(optimizer)
            unscale = partial(super()._unscale_grads_, optimizer, inv_scale, found_inf, allow_fp16)
            parameters = parameters_of(optimizer)
            found = self._surviving(
                lambda: self.workers.unscale(parameters, inv_scale, allow_fp16, unscale)
            )
            parts = self.workers.all_gather("unscale_", found)
        scalars = [scalar.to(self._home) for part in parts for scalar in part]
        return {self._home: torch.stack(scalars).sum()} if scalars else {}


def _check_dtype(optimizer: Optimizer) -> None:
    """Raise for gradients in which nothing small would be left if they were unscaled."""
    parameters = parameters_of(optimizer)
    if any(p.grad is not None and p.grad.dtype is torch.float16 for p in parameters):
        raise InputError(
            "gradients in float16 cannot be unscaled in place, as small ones would be lost. Keep "
            "the model in float32 and train it under torch.autocast(..., torch.float16), or use "
            "bfloat16, which needs no scaler"
        )


def scale_of(scaler: object) -> float | None:
    """What a step's loss is multiplied by before its backward; `None` without scaling.

    Raises:
        InputError: the scaler is none of a pipeline's.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, PipelineScaler):
        raise InputError(
            f"scaler={scaler!r} was not created by pipe.scaler(init_scale=...), which returns a "
            "torch.amp.GradScaler for all workers"
        )
    return scaler.begin()
