"""Closed modules that set the state of torch's generators do so while no other thread draws."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads

X, Y = torch.randn(16, 6), torch.randn(16, 6)


class SlowDropout(nn.Module):
    """Takes its time between being seeded and drawing, and before the generator is put back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = None  # which closes it
        time.sleep(0.003)
        x = F.dropout(x, 0.2, self.training)
        time.sleep(0.003)
        return x


class Checkpointed(nn.Module):
    """A checkpoint whose backward runs the forward again, with the generator as it was then."""

    def __init__(self, reentrant: bool, drop: bool) -> None:
        super().__init__()
        inner = SlowDropout() if drop else Waits()
        self.inner = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = None if self.reentrant else 1  # which closes it
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Waits(nn.Module):
    """Draws nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return x.tanh()


class Forks(nn.Module):
    """Draws the same noise every time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            time.sleep(0.003)
            noise = torch.randn(6)
            time.sleep(0.003)
        return self.linear(x) + noise


def setting(kind: str) -> nn.Module:
    if kind == "forks":
        return Forks()
    return Checkpointed(kind.startswith("reentrant"), kind.endswith("drops"))


@pytest.mark.parametrize(
    "kind", ["reentrant drops", "plain drops", "reentrant waits", "plain waits", "forks"]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_sets_generators_disturbs_no_other_thread(kind: str, replicas: int) -> None:
    torch.manual_seed(8)
    layers = [setting(kind), nn.Linear(6, 6), SlowDropout(), setting(kind), nn.Linear(6, 6)]
    model = nn.Sequential(nn.Linear(6, 6), *layers)
    twin, seed = copy.deepcopy(model), torch.initial_seed()
    with ps.Pipeline(
        *(model, (X,)),
        devices=["cpu"] * 2,
        cuts=["3"] if replicas == 1 else [],
        num_microbatches=8,
        schedule="1f1b",
        replicas=replicas,
        audit=None,
        progress=None,
    ) as pipe:
        reference = one_device(twin, pipe.program, 8, (X,), {})
        for step in range(2):
            before = torch.get_rng_state()
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            assert torch.equal(torch.get_rng_state(), before)
            assert torch.initial_seed() == seed
            run_with_threads(lambda s=step: reference.train_step(s, F.mse_loss, Y), 1)
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad, q.grad), name


def test_only_calls_that_ask_for_states_are_kept_alone() -> None:
    program = ps.capture(nn.Sequential(Forks(), nn.Linear(6, 6), SlowDropout()), (X,))
    kept = {call.label for call in program.train.calls if call.keeps_states}
    assert kept == {"0"}
    assert kept == {
        call.label for call in program.train.calls if call.is_seeded and not call.random
    }
    assert not any(call.random for call in program.train.calls if call.label == "0")


def test_a_checkpoint_that_draws_nothing_runs_beside_others() -> None:
    """Its forward only asks for the state, and in its backward nobody draws."""
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(True, drop=False), nn.Linear(6, 6))
    program = ps.capture(model, (X,))
    (call,) = (call for call in program.train.calls if call.keeps_states)
    assert not call.is_seeded
    assert not any(stage.keeps_states for stage in program.stages((), training=True))
