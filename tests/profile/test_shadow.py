"""The modules that are measured in the model's place."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from penstock.profile.shadow import shadow


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_forward_that_was_replaced_in_an_instance_leaves_no_gradients() -> None:
    """It is bound to the model, as trl's SFTTrainer does it, and ran the model's own modules."""
    model = Doubled()
    model.forward = MethodType(lambda self, x: 2 * self.layer(x), model)  # type: ignore[method-assign]
    twin = shadow(model, torch.device("cpu"))
    found = twin(torch.ones(2, 4))
    assert torch.equal(found, model(torch.ones(2, 4)))
    found.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())
