"""What a pipeline offers as the model does that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, SupportsIndex

from torch import nn

from penstock.training.hints import no_attribute


class ModelLike:
    """The parameters and modes of a model, by the names that `nn.Module` has for them.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, vars(self).get("model"), name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, as it has workers. To copy its model: "
            "copy.deepcopy(pipe.model); to save it: torch.save(pipe.state_dict(), file) or "
            "pipe.save(folder); to have it elsewhere, build another Pipeline there"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.model.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, with the model's names for them.

        Raises:
            TypeError: `torch.func.functional_call` takes the pipeline for a module.
        """
        if not remove_duplicate:
            raise TypeError(
                "a Pipeline is no nn.Module whose parameters can be replaced for a call, as "
                "torch.func.functional_call does; give it pipe.model, which runs unsplit"
            )
        return self.model.named_parameters(prefix, recurse)

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
