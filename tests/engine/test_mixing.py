"""Losses and models in which rows meet other rows are told so; others are not, and none notices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.engine.user_functions import may_have_effects

pytestmark = pytest.mark.filterwarnings("error::penstock.errors.RowsWarning")

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, -100, 3, -100, -100, 2, 1])


def pipeline(kind: Any = "threads", model: nn.Module | None = None, **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    options = {"schedule": "gpipe", "recompute": "none", "num_microbatches": 2} | options
    return ps.Pipeline(model, (X,), devices=["cpu", "cpu"], workers=kind, **options, replicas=1)


def info_nce(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = F.normalize(output) @ F.normalize(target).t()
    logits[torch.eye(len(logits), dtype=torch.bool)] *= 2.0
    return F.cross_entropy(logits, torch.arange(len(logits)))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loss_that_compares_rows(kind: Any) -> None:
    with pipeline(kind) as pipe:
        with pytest.warns(
            ps.RowsWarning, match=r"two pieces make.*compares rows.*whole_batch\(fn\)"
        ):
            pipe.train_step(X, target=Y, loss_fn=info_nce)
        gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        pipe.zero_grad()
        pipe.train_step(X, target=Y, loss_fn=info_nce)  # it is said once
        again = [p.grad for p in pipe.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients, again))
        whole = pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(info_nce))  # as it says
        assert torch.allclose(whole, info_nce(pipe.model(X), Y), atol=1e-6)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loss_that_compares_rows_in_micro_batches_of_one_row(kind: Any) -> None:
    warned = pytest.warns(ps.RowsWarning, match="two pieces make")
    with pipeline(kind, num_microbatches=len(X)) as pipe, warned:
        pipe.train_step(X, target=Y, loss_fn=info_nce)


def test_losses_of_rows_in_micro_batches_of_one_row(recwarn: Any) -> None:
    with pipeline(num_microbatches=len(X)) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        pipe.eval_step(X, target=Y, loss_fn=partial(F.mse_loss, reduction="sum"), weight=None)
        counted = LABELS.clamp(min=0)
        pipe.train_step(X, target=counted, loss_fn=F.cross_entropy)
    assert not [w for w in recwarn if issubclass(w.category, ps.RowsWarning)]


def test_the_place_of_the_warning_is_the_step() -> None:
    with pipeline() as pipe, pytest.warns(ps.RowsWarning) as said:
        pipe.train_step(X, target=Y, loss_fn=info_nce)
    assert said[0].filename == __file__


def test_a_mean_over_labels_that_count() -> None:
    with pipeline() as pipe:
        with pytest.warns(ps.RowsWarning, match=r"weight='rows'.*weight=lambda target"):
            pipe.train_step(X, target=LABELS, loss_fn=F.cross_entropy)
        pipe.zero_grad()
        loss = pipe.train_step(
            X, target=LABELS, loss_fn=F.cross_entropy, weight=lambda t: (t != -100).sum()
        )
        assert torch.allclose(loss, F.cross_entropy(pipe.model(X), LABELS))


def test_a_sum_and_a_mean() -> None:
    total = nn.MSELoss(reduction="sum")
    with pipeline() as pipe:
        with pytest.warns(ps.RowsWarning, match=r"weight='rows'.*None for a loss that is a sum"):
            pipe.train_step(X, target=Y, loss_fn=total)
        pipe.train_step(X, target=Y, loss_fn=total, weight=None)
        with pytest.warns(ps.RowsWarning, match=r"with weight=None"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss, weight=None)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.inner = nn.SmoothL1Loss()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(output, target)


HARMLESS: dict[str, Callable[..., torch.Tensor]] = {
    "mean": F.mse_loss,
    "module": nn.L1Loss(),
    "own module": Weighted(),
    "partial": partial(F.huber_loss, delta=0.5),
    "lambda": lambda o, t: (o - t).abs().mean() + o.square().mean(),
    "difference of means": lambda o, t: o.mean() - t.mean(),
    "draws": lambda o, t: F.mse_loss(F.dropout(o, 0.5), t),
    "entropy": lambda o, t: -(F.softmax(o, 1) * F.log_softmax(o, 1)).sum(1).mean(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_losses_of_rows_are_not_complained_about(name: str) -> None:
    with pipeline() as pipe:
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=HARMLESS[name])
        pipe.train_microbatches(
            [(X[:3],), (X[3:],)], targets=[Y[:3], Y[3:]], loss_fn=HARMLESS[name]
        )


HISTORY: list[float] = []
COUNTS = {"calls": 0}


class Meter:
    def __init__(self) -> None:
        self.seen = 0

    def note(self, loss: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return loss


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss


METER = Meter()


def appends(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = info_nce(output, target)
    HISTORY.append(loss.item())
    return loss


def counts(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    COUNTS["calls"] += 1
    return info_nce(output, target)


def meters(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return METER.note(info_nce(output, target))


def test_a_loss_that_would_notice_is_called_once_for_each_micro_batch() -> None:
    running = Running()
    calls = 0

    def nonlocal_count(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return info_nce(output, target)

    HISTORY.clear()
    METER.seen = COUNTS["calls"] = 0
    with pipeline() as pipe:
        for loss_fn in (appends, counts, meters, running, nonlocal_count):
            assert may_have_effects(loss_fn)
            pipe.train_step(X, target=Y, loss_fn=loss_fn)
    assert (len(HISTORY), COUNTS["calls"], METER.seen, calls) == (2, 2, 2, 2)


def test_what_has_no_effects() -> None:
    for loss_fn in (*HARMLESS.values(), info_nce, nn.CrossEntropyLoss(torch.ones(4))):
        assert not may_have_effects(loss_fn)
    hooked = nn.L1Loss()
    hooked.register_forward_hook(lambda *_: None)
    for function in (hooked, Meter().note, lambda o, t: print(o)):
        assert may_have_effects(function)


def test_random_numbers_are_not_moved() -> None:
    def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output + torch.randn_like(output), target)

    losses = []
    for already in (False, True):
        torch.manual_seed(3)
        with pipeline() as pipe:
            torch.manual_seed(4)
            if already:
                pipe._passes._mixing.of_loss((noisy.__code__, id("rows")), [], None, "rows")
            losses.append([pipe.train_step(X, target=Y, loss_fn=noisy) for _ in range(3)])
            losses[-1].append(torch.rand(()))
    assert all(map(torch.equal, *losses))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.b(self.a(x).tanh())
        return z @ z.t()


def test_a_model_in_which_rows_meet() -> None:
    with pipeline(model=Pairs()) as pipe:
        with pytest.warns(ps.RowsWarning, match=r"returns float32\[BxB\].*its own rows only"):
            pipe.train_step(X, loss_fn=torch.mean)
        pipe.train_step(X, loss_fn=torch.mean)
    with pipeline(model=Pairs(), num_microbatches=1) as pipe:
        pipe.train_step(X, loss_fn=torch.mean)


def test_as_an_error_it_comes_before_the_step() -> None:
    with pipeline(model=Pairs()) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ps.RowsWarning):
            pipe.train_step(X, loss_fn=torch.mean)
        assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_micro_batch_in_which_no_label_counts(kind: Any) -> None:
    """Its mean is no number, and so is that of the batch; what is right is seen afterwards."""
    none_counts = torch.tensor([0, 1, 2, 3, -100, -100, -100, -100])
    with pipeline(kind) as pipe:
        with pytest.warns(ps.RowsWarning, match=r"1 of 2 micro-batches is NaN.*weight=lambda"):
            loss = pipe.train_step(X, target=none_counts, loss_fn=F.cross_entropy)
        assert loss.isnan()
        pipe.train_step(X, target=none_counts, loss_fn=F.cross_entropy)  # it is said once
        counted = pipe.train_step(
            *(X,),
            target=none_counts,
            loss_fn=F.cross_entropy,
            weight=lambda target: (target != -100).sum(),
        )
        assert counted.isfinite()
        with pytest.warns(ps.RowsWarning, match="two pieces make"):  # it is looked at again
            pipe.train_step(X, target=LABELS, loss_fn=F.cross_entropy)


def test_a_loss_that_is_no_number_anywhere_is_the_models() -> None:
    with pipeline() as pipe:
        loss = pipe.train_step(X, target=Y * float("nan"), loss_fn=F.mse_loss)
        assert loss.isnan()
