"""Backwards in halves: the same bits, in two goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture import Key
from penstock.capture.halves import Deferral, run_halved, run_pending
from penstock.capture.lowering import StageModule, lower
from tests.support.models import gpt2, vision_transformer

ROWS = 4


class Functional(nn.Module):
    """Products written as functions, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 6))
        self.b = nn.Parameter(torch.randn(6, 8))
        self.c = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.addmm(self.c, x @ self.a, self.b).relu(), self.b)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens).logits
        return logits


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 2),
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, int]] = {
    "images": (images, torch.randn(ROWS, 3, 8, 8), 3),
    "words": (words, torch.randint(16, (ROWS, 5)), 3),
    "functional": (Functional, torch.randn(ROWS, 8), 1),  # b is used twice: not halved
    "gpt2": (Language, torch.randint(64, (ROWS, 16)), 9),  # the tied head is not
    "vit": (vision_transformer, torch.randn(ROWS, 3, 16, 16), 6),  # attention is not
}


def lowered(
    model: nn.Module, x: torch.Tensor, deferral: Deferral | None, ready: bool = True
) -> StageModule:
    program = ps.capture(model, (x,))
    inputs, outputs = program.cuts.boundary(0), program.cuts.results
    stage = lower(model, program.train, range(len(program)), inputs, outputs, None, deferral)
    if deferral is not None and ready:
        stage({"B": ROWS}, Key(0, 0, 0), x.clone())  # from now on it knows which are products
    return stage


def backward(stage: StageModule, x: torch.Tensor) -> torch.Tensor | None:
    """Forward and backward; the gradient of the input."""
    leaf = x.clone().requires_grad_(x.is_floating_point())
    results = stage({"B": ROWS}, Key(0, 0, 0), leaf * 1 if x.is_floating_point() else leaf)
    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    return leaf.grad


def gradients(model: nn.Module) -> dict[str, Any]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def halves(stage: StageModule) -> list[Any]:
    """What is known of the calls that may be halved."""
    nodes = [n for n in stage.graph.nodes if n.target is run_halved]
    return [getattr(stage, n.args[0].target) for n in nodes]


@pytest.mark.parametrize("name", CASES)
def test_both_halves_are_the_whole_bit_for_bit(name: str) -> None:
    build, x, count = CASES[name]
    torch.manual_seed(0)
    model, deferral = build(), Deferral()
    whole, split = lowered(model, x, None), lowered(model, x, deferral)
    expected_input = [backward(whole, x) for _ in range(2)][-1]  # twice: gradients add up
    expected = gradients(model)
    model.zero_grad()
    for _ in range(2):
        found_input = backward(split, x)
        run_pending(deferral.take())
    found = gradients(model)
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter
    if expected_input is not None:
        assert found_input is not None
        assert torch.equal(found_input, expected_input)
    assert sum(half.is_one_product for half in halves(split)) == count


class RootMeanSquare(nn.Module):
    """What enters reaches the result on two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(8, 8), RootMeanSquare(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.after(self.norm(x))


def test_the_very_first_backward_sums_in_the_order_of_a_whole_one() -> None:
    """Before it is known what is a product: the gradients of `x` must not be summed in parts."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(64, 8)
    program = ps.capture(model, (x,), keep_closed=["norm"])
    inputs, outputs = program.cuts.boundary(0), program.cuts.results
    found = []
    for deferral in (None, Deferral()):
        model.zero_grad()
        stage = lower(model, program.train, range(len(program)), inputs, outputs, None, deferral)
        (result,) = stage({"B": 64}, Key(0, 0, 0), x)
        result.backward(x)
        if deferral is not None:
            run_pending(deferral.take())
        found.append(gradients(model))
    assert all(torch.equal(found[1][name], whole) for name, whole in found[0].items())


class Positions(nn.Module):
    """Reads nothing of what it is given but its size, as many embeddings of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape) @ self.weight


def test_a_call_whose_gradients_do_not_reach_what_entered_is_not_halved() -> None:
    model, deferral = nn.Sequential(nn.Linear(8, 8), Positions(), nn.Linear(8, 8)), Deferral()
    x = torch.randn(ROWS, 8)
    program = ps.capture(model, (x,), keep_closed=["1"])
    inputs, outputs = program.cuts.boundary(0), program.cuts.results
    stage = lower(model, program.train, range(len(program)), inputs, outputs, None, deferral)
    for _ in range(2):
        backward(stage, x)
        run_pending(deferral.take())
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None
    assert model[2].weight.grad is not None


class Second(nn.Module):
    """Reads one of two values, of which one node computes the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Second()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(*self.first(x).chunk(2, -1))  # type: ignore[no-any-return]


def test_values_of_which_one_node_computes_the_gradients_are_told_apart() -> None:
    model, deferral = Chunks(), Deferral()
    program = ps.capture(model, (torch.randn(ROWS, 8),), keep_closed=["second"])
    inputs, outputs = program.cuts.boundary(0), program.cuts.results
    stage = lower(model, program.train, range(len(program)), inputs, outputs, None, deferral)
    for _ in range(2):
        backward(stage, torch.randn(ROWS, 8))
        run_pending(deferral.take())
    assert model.second.weight.grad is not None
    assert model.first.weight.grad is not None


def test_the_first_half_leaves_the_weights_for_the_second() -> None:
    model, deferral = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), Deferral()
    stage = lowered(model, torch.randn(ROWS, 4), deferral)
    backward(stage, torch.randn(ROWS, 4))
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None  # a normalisation computes both at once
    run_pending(deferral.take())
    assert model[0].weight.grad is not None
    assert not deferral.pending


def test_hooks_of_parameters_fire_once() -> None:
    model, deferral, fired = nn.Linear(4, 4), Deferral(), []
    model.weight.register_hook(lambda _: fired.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    stage = lowered(nn.Sequential(model), torch.randn(ROWS, 4), deferral)
    fired.clear()
    backward(stage, torch.randn(ROWS, 4))
    assert fired == []
    run_pending(deferral.take())
    assert fired == ["gradient", "accumulated"]


def test_a_backward_hook_of_a_module_sees_a_whole_backward() -> None:
    model, deferral, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Deferral(), []
    stage = lowered(model, torch.randn(ROWS, 4), deferral)
    model[1].register_full_backward_hook(lambda *_: seen.append(model[1].weight.grad is None))
    backward(stage, torch.randn(ROWS, 4))
    assert len(seen) == 1
    assert model[1].weight.grad is not None
    assert model[0].weight.grad is None


def test_frozen_weights_have_no_second_half() -> None:
    model, deferral = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Deferral()
    stage = lowered(model, torch.randn(ROWS, 4), deferral)
    model[1].requires_grad_(False)
    backward(stage, torch.randn(ROWS, 4))
    assert len(deferral.pending) == 1
    run_pending(deferral.take())
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


def test_without_gradients_it_is_the_plain_call() -> None:
    model, deferral = nn.Sequential(nn.Linear(4, 4)), Deferral()
    x = torch.randn(ROWS, 4)
    stage = lowered(model, x, deferral)
    with torch.no_grad():
        (result,) = stage({"B": ROWS}, None, x)
    assert torch.equal(result, model(x))
    assert not result.requires_grad


class Counting(nn.Module):
    """Knows how often it was called."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.product = product
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.weight if self.product else x * self.weight.sum() * self.calls


@pytest.mark.parametrize("product", [True, False])
def test_a_module_is_called_once_for_every_forward(product: bool) -> None:
    model, deferral = Counting(product), Deferral()
    stage = lowered(nn.Sequential(nn.Linear(4, 4), model), torch.randn(ROWS, 4), deferral)
    model.calls = 0
    for calls in (1, 2, 3):
        backward(stage, torch.randn(ROWS, 4))
        assert model.calls == calls


def test_a_hook_of_a_result_fires_once() -> None:
    model, deferral, fired = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Deferral(), []
    stage = lowered(model, torch.randn(ROWS, 4), deferral)
    model[0].register_forward_hook(lambda _, __, out: out.register_hook(fired.append) and None)
    backward(stage, torch.randn(ROWS, 4))
    run_pending(deferral.take())
    assert len(fired) == 1
