"""Which forwards are known to do nothing but call torch on what can be looked at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.engine.known_python import why_unknown
from penstock.loading import tolerate_missing_torchvision_operators

tolerate_missing_torchvision_operators()

SCALE = 2.0


def halved(x: Tensor) -> Tensor:
    return x * 0.5


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Part(nn.Module):
    factor = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))
        self.eps, self.shape, self.options = 1e-5, (2,), {"a": [1]}
        self.hidden = [nn.Dropout()]
        self.plain = torch.ones(2)
        self.act, self.own_act = F.gelu, scaled
        self.bound = self.helper

    def helper(self, x: Tensor) -> Tensor:
        return x * self.eps

    @property
    def doubled(self) -> float:
        return 2 * self.eps


class Norm(Part):
    def forward(self, x: Tensor) -> Tensor:
        parts = [halved(x) for _ in range(len(self.shape))]
        x = self.act(self.layer(x)) * self.doubled + math.sqrt(2) + self.options["a"][0]
        return F.layer_norm(self.helper(x), self.shape, self.weight, None, self.eps) + sum(parts)


class Inherits(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Moves(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 2
        return x


class OfTheClass(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class InAList(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


class Unregistered(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain


class Global(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE


class CallsAGlobal(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.own_act(x)


class Bound(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.bound(x)


class Writes(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class PassesItself(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(list(nn.Module.children(self)))


class Differentiates(Part):
    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), x)[0]


@pytest.mark.parametrize("build", [Norm, nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_what_is_known(build: Any) -> None:
    module = build() if issubclass(build, Part) else build(4, 2)
    assert why_unknown(module) == ""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Moves(), "uses .data"),
        (OfTheClass(), "reads factor of its class"),
        (InAList(), "reads hidden, a list"),
        (Unregistered(), "reads plain, a Tensor"),
        (Global(), "reads SCALE, a variable of its module"),
        (CallsAGlobal(), "calls scaled, which reads SCALE"),
        (Bound(), "calls a method"),
        (Writes(), "writes last"),
        (PassesItself(), "passes itself on"),
        (Differentiates(), "uses .autograd"),
        (Inherits(), "calls what its class inherits"),
        (nn.LSTM(2, 2), "moves its weights"),
        (nn.Embedding(3, 2, sparse=True), "has sparse gradients"),
        (nn.Sequential(nn.Linear(2, 2), Global()), "reads SCALE"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_is_not_known(module: nn.Module, words: str) -> None:
    assert words in why_unknown(module)


def test_a_forward_of_its_own() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[assignment,method-assign]
    assert "has a forward of its own" in why_unknown(module)


def test_layers_of_language_models() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.pytorch_utils import Conv1D

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2)
    assert [why_unknown(m) for m in (Conv1D(2, 2), LlamaRMSNorm(2), LlamaMLP(config))] == [""] * 3
