"""A pipeline as an `nn.Module`, for code that wants one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from penstock.errors import InputError
from penstock.integrations.late import LatePipeline


class PipelinedModule(nn.Module):
    """A module that calls a model through a pipeline.

    Its parameters, buffers, submodules and state dict are the model's own, under the model's own
    names. The pipeline is built by the first call, whose arguments are its example. Under torchrun
    all ranks have to call `state_dict()`.

    Args:
        model: any module.
        **options: of `penstock.Pipeline`, such as `devices=` and `num_microbatches=`.

    Attributes:
        model: that module.
        late: its pipeline.

    Raises:
        InputError: `Pipeline` has no such option.
    """

    model: nn.Module
    late: LatePipeline

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if isinstance(model, PipelinedModule):
            raise InputError("this model is called through a pipeline already")
        super().__init__()
        late = LatePipeline(model, options)
        vars(self).update(model=model, late=late)  # not as a submodule, which would have a prefix
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; gradients flow through it as through the model."""
        return self.late(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        model = vars(self).get("model")
        if model is None:
            raise AttributeError(name)
        return getattr(model, name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's, as `nn.Module.named_modules` yields them."""
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's, as `nn.Module.named_children` yields them."""
        return self.model.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, with its current weights."""
        if self.late.are_ranks:
            self.late.fetch()
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the model.

        Raises:
            InputError: `assign` is true, which would replace the parameters that workers have.
        """
        if assign and self.late.pipe is not None:
            raise InputError(
                "load_state_dict(assign=True) replaces the parameters, and the workers have these; "
                "load with assign=False, or before the first call"
            )
        return self.model.load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Switch the model to training mode."""
        self.training = mode
        self.model.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function of every module of the model."""
        self.model.apply(fn)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        if self.late.pipe is None:
            self.model._apply(fn, recurse)
            return self
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if any(_differs(tensor, fn(tensor)) for tensor in tensors):
            raise InputError(
                "the model was to be moved or converted after its pipeline was built; do it before "
                "the first call"
            )
        return self

    def close(self) -> None:
        """Stop the workers. The model keeps its weights."""
        self.late.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PipelinedModule cannot be copied or pickled, because it has workers; copy or save "
            "its model, module.model"
        )

    def extra_repr(self) -> str:
        return f"through {self.late.pipe or 'a pipeline that its first call builds'}"


def _differs(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.device, tensor.dtype) != (other.device, other.dtype)
