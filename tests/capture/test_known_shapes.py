"""Recordings of shapes alone: operators on `meta` are asked once, and memory is the real one's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import penstock as ps
from penstock.capture import forward, generalising
from penstock.capture.known_shapes import KnownShapes


class Knowing(TorchDispatchMode):
    """Runs operators by `KnownShapes`."""

    def __init__(self) -> None:
        super().__init__()
        self.known = KnownShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.known.run(func, args, kwargs or {})


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


CALLS: list[Callable[[Tensor], Tensor]] = [
    nn.BatchNorm2d(6, device="meta"),
    nn.BatchNorm2d(6, device="meta").eval(),
    nn.Conv2d(6, 3, 3, device="meta"),
    nn.Linear(5, 7, device="meta"),
    nn.LayerNorm(5, device="meta"),
    lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
    lambda x: torch.cat([x, x.transpose(0, 1)[:4].transpose(0, 1)], 1),
    lambda x: x.to(torch.float64) * 2 + x.mean(),
    lambda x: (x > 0).sum(-1) / 3,
]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_known_is_what_the_operators_give(call: Callable[[Tensor], Tensor]) -> None:
    with Knowing():
        for size in (4, 4, 5, 4):
            x = torch.empty(2, 6, size + 2, 5, device="meta", requires_grad=True)
            last = x.transpose(2, 3).contiguous().transpose(2, 3)  # of other strides
            for given in (x, last):
                found = described(call(given))
                with _disable_current_modes():
                    assert found == described(call(given))


def test_an_operator_is_asked_once_for_the_same_arguments() -> None:
    known, asked = KnownShapes(), []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    add, x = torch.ops.aten.add.Tensor, torch.empty(2, 3, device="meta")
    with Asked():
        results = [known.run(add, (x, y), {}) for y in (x, x.double(), 1, 1.0, 1, x)]
    assert asked.count(add) == 4
    assert [result.dtype for result in results].count(torch.float64) == 1
    assert len({id(result) for result in results}) == 6


def test_views_and_what_is_written_stay_what_they_are() -> None:
    x = torch.empty(2, 3, device="meta")
    with Knowing():
        for _ in range(2):
            assert x.add_(1) is x
            assert x.view(6).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert F.dropout(x, training=False).untyped_storage()._cdata == (
                x.untyped_storage()._cdata
            )
    assert x._version == 2


def test_real_tensors_are_computed_every_time() -> None:
    x = torch.ones(2, 3)
    with Knowing():
        assert [float((x * k).sum()) for k in (1, 1, 2)] == [6.0, 6.0, 12.0]


class Heads(nn.Module):
    """Attention, whose results lie in memory otherwise on `meta` than where they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.dropout = nn.Linear(8, 24), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inside(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.dropout(attended.transpose(1, 2).contiguous().flatten(2))


def test_one_forward_of_evaluation_is_run_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generalising, "_LARGE", 0)
    record, real = forward.record, []

    def counted(model: nn.Module, *others: Any, **more: Any) -> Any:
        if not next(model.parameters()).is_meta:
            real.append(model.training)
        return record(model, *others, **more)

    monkeypatch.setattr(forward, "record", counted)
    model = nn.Sequential(Heads(), nn.Linear(8, 8))
    program = ps.capture(model, (torch.randn(4, 128, 8),))
    assert real == [True, False]
    model.eval()
    x = torch.randn(3, 128, 8)
    assert torch.equal(program(x), model(x))
