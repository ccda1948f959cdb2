"""What the script sees of gradients that are with the workers: that they are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import InputError
from penstock.torch_internals import foreach_zero, wrapper_subclass

_zeros = (torch.ops.aten.zero_.default, foreach_zero)
_detaches = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


class GradientElsewhere(torch.Tensor):
    """The gradient of a parameter in the script's model, when a worker of the cluster has it.

    It has the shape and the dtype of the gradient. Dropping it or setting it to zero does so there,
    and `any()` is whether it was not set to zero since; anything else is an error that says what to
    call instead.

    Attributes:
        is_zeroed: whether it was set to zero since that was last sent to the worker.
    """

    is_zeroed: bool

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> GradientElsewhere:
        """The gradient of this parameter."""
        made: GradientElsewhere = wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.is_zeroed = False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Set it to zero, as `zero_grad(set_to_none=False)` does.

        Raises:
            InputError: something else is asked for.
        """
        if func in _zeros:
            every = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for each in every:
                if isinstance(each, GradientElsewhere):
                    each.is_zeroed = True
                else:
                    each.zero_()
            return None if isinstance(args[0], (list, tuple)) else args[0]
        if func in _detaches:
            return args[0]
        if func is torch.ops.aten.any.default:
            return torch.tensor(not args[0].is_zeroed)
        raise InputError(
            f"{func.__name__.split('.')[0]}: this gradient is with a worker of the Ray cluster, "
            "and the script has only its shape. Use pipe.clip_grad_norm_ and "
            "pipe.clip_grad_value_, pipe.optimizer(torch.optim.AdamW, ...) and pipe.scaler(), "
            'which work where the gradients are; or workers="processes", whose gradients are here'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """In words: there is nothing to show."""
        return f"GradientElsewhere(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> GradientElsewhere:
        """Nobody changes it."""
        return self
