"""Another plan while training goes on: the same bits, optimizers, random numbers and hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.history import read_run
from penstock.planning import planner

X, Y = torch.randn(32, 64), torch.randn(32, 64)


class Deep(nn.Module):
    """Equal layers, with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.1, self.training)
        return self.norm(x)


def model() -> Deep:
    torch.manual_seed(3)
    return Deep()


@pytest.fixture
def uneven() -> ps.Plan:
    """A plan that gives one of two workers nearly all."""
    subject = model()
    return ps.plan(
        ps.profile(ps.capture(subject, (X,)), devices=["cpu", "cpu"], seconds=0.2),
        num_microbatches=4,
        cuts=["layers.1"],
        replicas=1,
    )


def step(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    return loss


@pytest.fixture
def fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """New profiles say that all calls take equally long, and links no time."""
    original = planner.profiles_for

    def profiles_for(*args: Any, **kwargs: Any) -> list[ps.Profile]:
        found = original(*args, **kwargs)
        return [
            replace(
                own,
                kinds={
                    name: replace(
                        kind,
                        forward=tuple(tuple(1.0 for _ in row) for row in kind.forward),
                        backward=tuple(tuple(2.0 for _ in row) for row in kind.backward),
                    )
                    for name, kind in own.kinds.items()
                },
                links={},
            )
            for own in found
        ]

    monkeypatch.setattr(planner, "profiles_for", profiles_for)


@pytest.mark.usefixtures("fair")
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_training_goes_on_with_the_same_bits(uneven: ps.Plan, workers: ps.Kind) -> None:
    def run(replans: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], ps.Plan]:
        torch.manual_seed(7)
        subject, steps = model(), []
        with ps.Pipeline(subject, (X,), devices=["cpu"] * 2, plan=uneven, workers=workers) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
            pipe.on_step(lambda news: steps.append(news["step"]))
            losses = [step(pipe, optimizer) for _ in range(3)]
            F.mse_loss(pipe(X), Y).backward()  # accumulated over the change
            if replans:
                assert pipe.replan()
                assert pipe.status().steps == 4
                assert "another plan" in pipe.status().events[-1].what
                assert pipe.accounts() == []  # those were of the other plan
            losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            optimizer.step()
            losses += [step(pipe, optimizer) for _ in range(3)]
            assert steps == list(range(1, 9))
            state = {name: value.clone() for name, value in pipe.state_dict().items()}
            moments = optimizer.state_dict()["state"]
            state |= {f"moment {k}": own["exp_avg"].clone() for k, own in moments.items()}
            return losses, state, pipe.plan

    losses, state, plan = run(replans=True)
    expected, others, same = run(replans=False)
    assert same == uneven
    assert (plan.cuts, plan.replicas) != (uneven.cuts, uneven.replicas)
    assert plan.num_microbatches == 4
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert state.keys() == others.keys()
    assert all(torch.equal(state[name], others[name]) for name in state)


def test_a_plan_that_is_as_good_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.Pipeline(model(), (X,), devices=["cpu"] * 2, num_microbatches=4) as pipe:
        monkeypatch.setattr(planner, "_WORTH", 0.0)  # whatever is measured
        workers, plan = pipe._workers, pipe.plan
        assert not pipe.replan()
        assert pipe._workers is workers
        assert pipe.plan.layout == plan.layout
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_a_plan_that_stays_is_predicted_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine is three times as slow as it was, whatever runs."""
    original = planner.profiles_for

    def profiles_for(*args: Any, **kwargs: Any) -> list[ps.Profile]:
        found = []
        for own in original(*args, **{**kwargs, "fresh": False}):
            kinds = {
                name: replace(
                    kind,
                    forward=tuple(tuple(3 * s for s in row) for row in kind.forward),
                    backward=tuple(tuple(3 * s for s in row) for row in kind.backward),
                )
                for name, kind in own.kinds.items()
            }
            found.append(replace(own, kinds=kinds))
        return found

    with ps.Pipeline(
        *(model(), (X,)), devices=["cpu"] * 2, num_microbatches=4, metrics=0, run=tmp_path
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD)
        for _ in range(4):
            step(pipe, optimizer)
        workers, plan = pipe._workers, pipe.plan
        monkeypatch.setattr(planner, "profiles_for", profiles_for)
        monkeypatch.setattr(planner, "_WORTH", 0.0)
        assert not pipe.replan()
        assert pipe._workers is workers
        assert pipe.plan.layout == plan.layout
        assert pipe.plan.predicted_step_seconds > 1.2 * plan.predicted_step_seconds
        status = pipe.status()
        assert status.predicted_seconds == pipe.plan.predicted_step_seconds
        assert status.planned_step_seconds is None  # those were compared with the old prediction
        assert "the plan stays" in status.events[-1].what
        assert pipe.accounts() == []
        step(pipe, optimizer)
        assert pipe.status().steps == 5
        assert read_run(tmp_path).about.plan == pipe.plan
        assert read_run(tmp_path / "earlier-1").about.plan == plan


def test_results_that_wait_for_their_backward_stay(uneven: ps.Plan) -> None:
    with ps.Pipeline(model(), (X,), devices=["cpu"] * 2, plan=uneven) as pipe:
        out = pipe(X)
        with pytest.raises(ps.InputError, match=r"call backward\(\), or delete the results"):
            pipe.replan()
        out.sum().backward()
    with pytest.raises(ps.ClosedError, match="close"):
        pipe.replan()


@pytest.mark.usefixtures("fair")
def test_metrics_stay_where_they_are(uneven: ps.Plan) -> None:
    with ps.Pipeline(model(), (X,), devices=["cpu"] * 2, plan=uneven, metrics=0) as pipe:
        url = pipe.metrics
        assert pipe.replan()
        assert pipe.metrics == url


@pytest.mark.usefixtures("fair")
def test_a_run_has_the_plan_that_its_records_are_of(uneven: ps.Plan, tmp_path: Path) -> None:
    with ps.Pipeline(model(), (X,), devices=["cpu"] * 2, plan=uneven, run=tmp_path) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD)
        for _ in range(4):
            step(pipe, optimizer)
        assert pipe.replan()
        for _ in range(5):
            step(pipe, optimizer)
        found = read_run(tmp_path)
        assert found.about.plan == pipe.plan
        assert found.records == pipe.history().records
        assert all(record.step > 4 for record in found.records)
        assert "another plan" in found.events[0].what
        earlier = read_run(tmp_path / "earlier-1")
        assert earlier.about.plan == uneven
        assert [record.step for record in earlier.records] == [3, 4]
        for account in pipe.accounts():
            assert all(own["forward"] > 0 for own in account.workers)
