"""Modules of torch that take kernels of their own, but not under a mode for torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps

X = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(6) >= torch.tensor([6, 4, 3, 6, 5, 2, 6, 6])[:, None]


class Repeated(nn.Module):
    """One layer or attention, three times."""

    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        if is_attention:
            self.layer: nn.Module = nn.MultiheadAttention(32, 4, batch_first=True)
        else:
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if isinstance(self.layer, nn.MultiheadAttention):
                x = self.layer(x, x, x, need_weights=False)[0]
            else:
                x = self.layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Padded(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return result


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (lambda: Repeated(False), (X,)),
        (lambda: Repeated(True), (X,)),
        (Padded, (X, PADDING)),
    ],
    ids=["layer", "attention", "padding"],
)
def test_they_take_them_in_evaluation(build: Callable[[], nn.Module], batch: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    with ps.Pipeline(model, batch, devices=1, num_microbatches=2) as pipe, torch.no_grad():
        halves = [model(*(x[half] for x in batch)) for half in (slice(4), slice(4, 8))]
        assert torch.equal(pipe(*batch), torch.cat(halves))


def test_an_encoder_without_padding_is_open() -> None:
    program = ps.capture(Padded(), (X,))
    targets = [call.target for call in program.train.calls if call.is_module]
    assert targets == ["encoder.layers.0", "encoder.layers.1", "head"]
    assert not program.closed


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_that_has_no_kernels_of_its_own_is_open() -> None:
    for options, batch in (({"norm_first": True}, (X, PADDING)), ({"bias": False}, (X, PADDING))):
        program = ps.capture(Padded(**options), batch)
        assert not program.closed


def test_padding_may_come_later_in_training() -> None:
    model = Padded()
    with ps.Pipeline(model, (X,), devices=1, num_microbatches=2, audit=None) as pipe:
        pipe.train_step(X, PADDING, loss_fn=lambda y: y.square().mean())
    assert model.head.weight.grad is not None


def test_no_cut_comes_between_calls_of_a_shared_one() -> None:
    program = ps.capture(Repeated(False), (X,))
    targets = [call.target for call in program.train.calls if call.is_module]
    assert targets == ["layer", "layer", "layer", "head"]
    assert [program.cuts.forbidden(cut) is None for cut in (1, 2, 3)] == [False, False, True]
