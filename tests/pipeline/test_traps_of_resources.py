"""Traps of memory and of failure: each test is named after its trap."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.schedule import check
from tests.support.models import mlp, uniform_plan
from tests.workers.processes.test_process_memory import Seen, Watch, ask

X, Y = torch.randn(24, 8), torch.randn(24, 8)
M = 24


pytestmark = pytest.mark.usefixtures("pool")


def make(model: nn.Module, cut: str, workers: str, m: int, **options: Any) -> ps.Pipeline:
    """In two stages."""
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, m, cuts=[cut])
    devices = ["cpu"] * 2
    return ps.Pipeline(
        model, devices=devices, program=program, plan=plan, workers=workers, **options
    )


def test_every_microbatch_holding_its_own_receive_buffer() -> None:
    """One was allocated for each; as many are enough as are in use at the same time."""
    with make(mlp(8, 8, 8), "2", "processes", M) as pipe:
        ask(pipe, Watch())
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        slots = [count for _, slots, _ in ask(pipe, Seen()) for count in slots.values()]
        in_flight = check(pipe.plan.schedule_for(M)).in_flight
    assert slots
    assert max(slots) <= max(in_flight) + 2 < M


class Sent(nn.Module):
    """Notes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x * 2
        self.given.append(weakref.ref(output))
        return output


class Counting(nn.Module):
    """Counts what is still there of what the other gave, and of what has come here already."""

    def __init__(self, sent: Sent) -> None:
        super().__init__()
        self.sent = [sent]
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.sent[0].given.clear()
        self.calls = self.most = self.most_used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.sent[0].given
        self.calls += 1
        self.most = max(self.most, sum(ref() is not None for ref in given))
        used = sum(ref() is not None for ref in given[: self.calls])
        self.most_used = max(self.most_used, used)
        return x * 3


@pytest.mark.parametrize("training", [True, False])
def test_sent_tensors_kept_until_the_end_of_the_step(training: bool) -> None:
    """A sender held all it had sent, micro-batch after micro-batch."""
    sent = Sent()
    counting = Counting(sent)
    model = nn.Sequential(nn.Linear(8, 8), sent, counting, nn.Linear(8, 8))
    with make(model, "2", "threads", M) as pipe:
        counting.clear()
        if training:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            assert counting.most <= max(check(pipe.plan.schedule_for(M)).in_flight) + 2
        else:  # the first stage may be ahead, but what the second has used is gone
            for _ in pipe.map([X] * 2, ahead=1):
                pass
            assert counting.most_used <= 2
        assert len(sent.given) == counting.calls == (M if training else 2 * M)
        assert counting.most_used > 0
        assert not any(ref() is not None for ref in sent.given)


class Fails(nn.Module):
    """Fails in one micro-batch, once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and bool((x.detach().abs() > 1e6).any()):
            raise ArithmeticError("too large")
        return x * self.weight


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("where", [0, 2])
def test_the_peer_of_a_failed_rank_blocking(workers: str, where: int) -> None:
    """It waited for 30 minutes for what would never come; it hears at once. Of ranks, see
    `tests/workers/ranks/test_torchrun.py`, `test_a_killed_rank`.
    """
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    layers.insert(where, Fails())
    model = nn.Sequential(*layers)
    cut = "2" if where == 0 else "1"
    bad = X.clone()
    bad[10] = 1e9
    with torch.no_grad():
        model[0 if where else 1].weight.mul_(10.0)
    if where:
        model[1] = nn.Identity()
    with make(model, cut, workers, 6, timeout=1800) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        with pytest.raises(ps.WorkerError) as raised:  # whose timeout is half an hour
            pipe.train_step(bad, target=Y, loss_fn=F.mse_loss)
        assert raised.value.microbatch == 2
        assert isinstance(raised.value.__cause__, ArithmeticError)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
