"""A `generate` that calls parts of the model, and never the model, is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from tests.generation.subjects import VOCABULARY, pipeline, tokens


class Translator(nn.Module):
    """An encoder and a decoder; `generate` runs them by themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8))
        self.decoder = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, VOCABULARY)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoded(self.encoder(ids))

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder:
            x = layer(x)
        return x

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, count: int, whole: bool = False) -> torch.Tensor:
        hidden = self.encoder(ids)
        for _ in range(count):
            logits = self(ids) if whole else self.decoded(hidden)
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
            hidden = self.encoder(ids)
        return ids


def test_the_error_names_them() -> None:
    with (
        pipeline(Translator().eval()) as pipe,
        pytest.raises(
            ps.InputError,
            match=r"parts of it \(self\.encoder, self\.decoder\.0, self\.decoder\.1\)",
        ),
    ):
        pipe.generate(tokens(2), 3)


def test_parts_may_be_called_besides_the_model() -> None:
    model, ids = Translator().eval(), tokens(2)
    with pipeline(model) as pipe:
        found = pipe.generate(ids, 3, whole=True, group_size=2)
    assert torch.equal(found, model.generate(ids, 3, whole=True))


class Idle(Translator):
    """Generates nothing."""

    def generate(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return ids


def test_nothing_needs_to_be_called() -> None:
    ids = tokens(3)
    with pipeline(Idle().eval()) as pipe:
        assert torch.equal(pipe.generate(ids), ids)
