"""What capturing holds at most, in bytes of tensors, beside a forward and backward of one row."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.capture_time import UNet
from penstock.bench.footprint import peak
from penstock.capture import generalising
from penstock.capture.calls import Ref
from penstock.capture.known import Known
from tests.support.interrupts import drop_interrupted


class Attention(nn.Module):
    """Attention whose scores are all there at the same time, as in models of before 2022."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.inside(self.norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-1, -2) / 4.0).softmax(-1)
        return x + self.outside((scores @ value).transpose(1, 2).reshape(rows, length, width))


def unet() -> tuple[nn.Module, torch.Tensor]:
    return UNet(), torch.randn(1, 1, 16, 16, 16)


def attention() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Attention(32, 4) for _ in range(4))), torch.randn(1, 200, 32)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        part
        for k in range(6)
        for part in (nn.Conv2d(8 if k else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Flatten(2)), torch.randn(1, 3, 96, 96)


@pytest.mark.parametrize("make", [unet, attention, convolutions])
def test_capturing_holds_little_more_than_a_step_of_one_row(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generalising, "_LARGE", 0)
    model, x = make()
    step = peak(lambda: model(x).square().mean().backward())
    model.zero_grad()
    gc.collect()
    gc.disable()  # nothing large may wait for it
    try:
        capture = peak(lambda: ps.capture(model, (x,)))
    finally:
        gc.enable()
    print(f"{capture / step:.2f}: {capture / 1e6:.1f} MB, and {step / 1e6:.1f} MB for a step")
    assert step > 2e6
    assert capture < 1.3 * step


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_garbage_collector_leaves_out_what_was_there_before(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was frozen before stays frozen."""
    counts = []

    def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        counts.append(gc.get_freeze_count())
        return F.linear(x, linear.weight)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    if is_frozen:
        gc.freeze()
    try:
        ps.capture(nn.Linear(3, 2), (torch.randn(8, 3),))
        assert min(counts) > 100_000
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()


def test_a_ctrl_c_is_not_lost_when_what_a_call_gave_dies() -> None:
    """And the name is not that of an object which is made in the same place later."""
    known = Known()
    held = [torch.ones(2)]
    known.put(held[0], Ref(0, 0))
    with pytest.raises(KeyboardInterrupt):
        drop_interrupted(held)
    for _ in range(100):
        assert known.get(torch.ones(2)) is None
    assert not known._values


def test_what_is_counted_is_what_lives_at_the_same_time() -> None:
    def three() -> None:
        a = torch.ones(1000)
        a[1:].add_(1)  # the same memory
        b = a + a
        del a
        b.clone()

    assert peak(three) == 8000


def test_views_of_what_was_there_before_hold_nothing_more() -> None:
    weight = torch.ones(1000)
    assert peak(lambda: weight.view(10, 100).t()) == 4000
    assert peak(lambda: weight.view(10, 100).t() + 1, beyond=[weight]) == 4000
    assert peak(lambda: weight.view(10, 100).t(), beyond=[weight]) == 0


def test_a_step_counts_what_its_backward_needs() -> None:
    model = nn.Sequential(*(nn.Sigmoid() for _ in range(10)))
    x = torch.ones(1000, requires_grad=True)
    assert peak(lambda: model(x).sum()) > 10 * 4000
    with torch.no_grad():
        assert peak(lambda: model(x).sum()) < 3 * 4000
