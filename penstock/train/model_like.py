"""What a pipeline offers as the model does that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from torch import nn


class ModelLike:
    """The parameters and modes of a model, by the names that `nn.Module` has for them.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, with the model's names for them."""
        return self.model.named_parameters()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state of the model, from here or from plain PyTorch."""
        return self.model.load_state_dict(state_dict, strict)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, like `nn.Module.train`."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode, like `nn.Module.eval`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.model.zero_grad(set_to_none)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Meanwhile a model is in evaluation mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
