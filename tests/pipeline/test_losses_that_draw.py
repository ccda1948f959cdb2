"""Losses and metrics that draw random numbers: those of one device, wherever they are called."""

from __future__ import annotations

import copy
import threading

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device
from tests.pipeline.test_losses import KINDS, make
from tests.support.models import mlp
from tests.support.training import X, Y, assert_same, gradients


def dropped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of some of the elements, chosen at random."""
    return F.mse_loss(F.dropout(output, 0.5), target)


def sampled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Metrics that draw too."""
    return output.sum() + torch.rand(())


def test_a_loss_and_metrics_that_draw_have_the_random_numbers_of_one_device() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 5))
    twin, found = copy.deepcopy(model), []
    for kind in KINDS:
        with make(copy.deepcopy(model), kind) as pipe:
            before = torch.get_rng_state()
            for _ in range(2):
                loss, _, metrics = pipe.train_step(X, target=Y, loss_fn=dropped, metrics=sampled)
            assert torch.equal(torch.get_rng_state(), before)
            found.append(({"loss": loss, "metrics": metrics}, gradients(pipe)))
            plain = one_device(twin, pipe.program, 3, (X,), {})
    for step in range(2):
        loss = plain.train_step(step, dropped, Y)
    for results, grads in found:
        assert_same(grads, plain.gradients)
        assert_same(results, {**found[0][0], "loss": loss})


def test_a_loss_that_draws_for_some_micro_batches() -> None:
    def sometimes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return dropped(output, target) if target.mean() > 0 else F.mse_loss(output, target)

    target = torch.tensor([1.0] * 4 + [-1.0] * 4 + [1.0] * 3)[:, None].expand(11, 5).contiguous()
    with make(mlp(6, 6, 5)) as pipe:
        plain = one_device(copy.deepcopy(pipe.model), pipe.program, 3, (X,), {})
        before = torch.get_rng_state()
        loss = pipe.train_step(X, target=target, loss_fn=sometimes)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(loss, plain.train_step(0, sometimes, target))


def test_verify_with_a_loss_that_draws() -> None:
    report = ps.verify(
        mlp(6, 6, 5), (X,), target=Y, loss_fn=dropped, devices=["cpu"] * 2, replicas=1
    )
    assert report.ok, str(report)


def test_a_loss_that_draws_leaves_other_stages_their_masks() -> None:
    """CPU generators are process-wide, and a thread may draw at any time."""
    drawing, drawn = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.rand_like(x)
            if self.meets:
                drawn.clear()
                drawing.set()
                drawn.wait(0.2)  # the loss of the micro-batch before may not draw now
                drawing.clear()
            return x * (mask + torch.rand_like(x))

        meets = False

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if slow.meets:
            drawing.wait(0.2)
        loss = F.mse_loss(output * torch.rand_like(output), target)
        drawn.set()
        return loss

    slow, found = Slow(), []
    model = nn.Sequential(nn.Linear(6, 6), slow, nn.Linear(6, 5))
    for meets in (False, True):
        slow.meets = False
        torch.manual_seed(5)
        with make(model, keep_closed=["1"], cuts=[2]) as pipe:
            slow.meets = meets
            found.append(pipe.train_step(X, target=Y, loss_fn=loss_fn))
    assert torch.equal(*found)
