"""What a training script does with a pipeline, beside training steps themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from penstock.engine.stage import Stage
from penstock.schedule import SCHEDULES, Rules, check
from tests.support.models import UNet, cases, mlp, pipeline, planned

X, Y = torch.randn(10, 8), torch.randn(10, 8)


def make(model: nn.Module, p: int = 2, m: int = 3, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(model, (X,), devices=["cpu"] * p, num_microbatches=m, **options, replicas=1)


@pytest.fixture
def pipe() -> Iterator[ps.Pipeline]:
    with make(mlp(8, 8, 8, 8)) as found:
        yield found


def accumulate(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int) -> None:
    for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
        (F.mse_loss(model(part), target) * (len(part) / len(x))).backward()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_the_last_batch_of_an_epoch(pipe: ps.Pipeline, rows: int) -> None:
    twin = copy.deepcopy(pipe.model)
    pipe.train_step(X[:rows], target=Y[:rows], loss_fn=F.mse_loss)
    run_with_threads(lambda: accumulate(twin, X[:rows], Y[:rows], min(3, rows)), 1)
    assert_same_gradients(pipe.model, twin)
    assert pipe(X[:rows]).shape == (rows, 8)  # not a row more


def test_a_sum_is_added_up(pipe: ps.Pipeline) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    loss = pipe.train_step(X, target=Y, loss_fn=loss_fn, weight=None)
    assert torch.allclose(loss, loss_fn(pipe.model(X), Y))


@pytest.mark.parametrize(
    ("target", "loss_fn"),
    [
        (Y, lambda o, t: F.mse_loss(o, t)),
        ({"a": Y, "b": [Y]}, lambda o, t: F.mse_loss(o, (t["a"] + t["b"][0]) / 2)),
        ((Y, "mean"), lambda o, t: F.mse_loss(o, t[0], reduction=t[1])),
    ],
)
def test_targets_of_every_shape(pipe: ps.Pipeline, target: Any, loss_fn: Any) -> None:
    twin = copy.deepcopy(pipe.model)
    pipe.train_step(X, target=target, loss_fn=loss_fn)
    run_with_threads(lambda: accumulate(twin, X, Y, 3), 1)
    assert_same_gradients(pipe.model, twin)


def test_inputs_get_gradients_in_both_styles(pipe: ps.Pipeline) -> None:
    twin, leaf = copy.deepcopy(pipe.model), X.clone().requires_grad_()
    run_with_threads(lambda: accumulate(twin, leaf, Y, 3), 1)
    ours = X.clone().requires_grad_()
    pipe.train_step(ours, target=Y, loss_fn=F.mse_loss)
    assert torch.equal(ours.grad, leaf.grad)

    plain, leaf = X.clone().requires_grad_(), (X * 2).requires_grad_()
    F.mse_loss(pipe(plain * 2), Y).backward()
    reference = one_device(twin, pipe.program, 3, (leaf,), {})
    run_with_threads(lambda: reference.call_and_backward(0, F.mse_loss, Y), 1)
    assert torch.equal(plain.grad, leaf.grad * 2)


def test_a_second_backward_of_a_graph_that_was_not_kept_is_refused(pipe: ps.Pipeline) -> None:
    output = pipe(X)
    first, second = output.square().mean(), output.mean()
    first.backward()
    again = r"retain_graph=True before.*call the pipeline again"
    with pytest.raises(ps.PenstockError, match=again):
        second.backward()


def test_two_calls_before_one_backward(pipe: ps.Pipeline) -> None:
    twin = copy.deepcopy(pipe.model)
    (pipe(X) * pipe(Y)).sum().backward()
    (twin(X) * twin(Y)).sum().backward()
    for ours, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


def test_no_grad_keeps_nothing(pipe: ps.Pipeline) -> None:
    with torch.no_grad():
        assert not pipe(X).requires_grad
    assert pipe(X).requires_grad


class Watched(nn.Linear):
    """Counts its backwards."""

    backwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self._count)
        return output

    def _count(self, gradient: torch.Tensor) -> None:
        Watched.backwards += 1


def test_a_frozen_half_runs_no_backward() -> None:
    model = nn.Sequential(Watched(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with make(model, p=3, audit=None) as pipe:
        Watched.backwards = 0
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert Watched.backwards == 3  # it is counted at all
        pipe.zero_grad()
        model[0].requires_grad_(False)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert Watched.backwards == 3
        assert model[0].weight.grad is None
        assert model[2].weight.grad is not None


class Columns(nn.Module):
    """Gives columns of its result that it chooses by integers, and a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        chosen = self.second(hidden)[:, hidden.argmax(1).remainder(8)]
        return {"pair": (chosen, [hidden.transpose(0, 1)]), "n": 3}


def test_results_whose_dimensions_are_no_rows() -> None:
    with make(Columns(), p=3, m=1) as pipe:
        ours, theirs = pipe(X), pipe.model(X)
    assert ours["n"] == 3
    assert torch.equal(ours["pair"][0], theirs["pair"][0])
    assert torch.equal(ours["pair"][1][0], theirs["pair"][1][0])
    assert not ours["pair"][1][0].is_contiguous()


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_stage_holds_what_its_schedule_promises(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: dict[int, int] = {}
    forward = Stage.forward

    def watched(stage: Stage, microbatch: int) -> None:
        forward(stage, microbatch)
        held = len(stage.held) + len(stage.deferred)  # the weight half holds it as well
        peaks[stage.index] = max(peaks.get(stage.index, 0), held)

    monkeypatch.setattr(Stage, "forward", watched)
    with make(mlp(*[8] * 8), p=3, m=6, schedule=schedule) as pipe:
        peaks.clear()  # of what was measured
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        stages = pipe._runner.workers._assemblies[True][0].stages  # type: ignore[attr-defined]
        assert not any(stage.held or stage.deferred for stage in stages.values())
        promised = check(pipe.plan.schedule_for(6)).in_flight
    assert tuple(peaks[s] for s in range(len(stages))) == promised


def test_recording(pipe: ps.Pipeline) -> None:
    with pipe.recording() as timelines:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert len(timelines) == 2
    first = timelines[0]
    actions = [a for actions in pipe.plan.schedule_for(3).workers for a in actions]
    assert sorted(e.action for e in first.events) == sorted(actions)
    assert min(phase.start for phase in first.phases) == 0
    assert all(0 < busy <= first.seconds for busy in first.busy())


def test_state_dicts_are_the_models_own() -> None:
    model = UNet()
    names = list(model.state_dict())
    images = torch.randn(10, 3, 8, 8)
    with ps.Pipeline(model, (images,), devices=["cpu"] * 3, num_microbatches=2, replicas=1) as pipe:
        assert list(pipe.state_dict()) == names == list(UNet().state_dict())
        plain = UNet()
        plain.load_state_dict(pipe.state_dict())
        other = UNet()
        pipe.load_state_dict(other.state_dict())
        pipe.eval()
        other.eval()
        with torch.no_grad():
            assert torch.allclose(pipe(images), other(images), atol=1e-6)
            assert not torch.allclose(pipe(images), plain.eval()(images), atol=1e-6)


def test_autocast_reaches_the_workers(pipe: ps.Pipeline) -> None:
    seen = []

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        seen.append(output.dtype)
        return output.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        assert pipe(X).dtype == torch.bfloat16
        pipe.train_step(X, loss_fn=loss_fn)
    assert pipe(X).dtype == torch.float32
    pipe.train_step(X, loss_fn=loss_fn)
    assert seen == [torch.bfloat16] * 3 + [torch.float32] * 3
    assert all(p.grad.dtype == torch.float32 for p in pipe.parameters())


def test_clipping_is_torchs(pipe: ps.Pipeline) -> None:
    pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    twin = copy.deepcopy(pipe.model)
    for ours, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert torch.equal(pipe.clip_grad_norm_(0.1), expected)
    assert_same_gradients(pipe.model, twin)


def test_the_models_own_parameters_are_trained() -> None:
    case = cases()["unet"]
    with pipeline(case, planned("unet", 2, 3)) as pipe:
        assert pipe.shares_model
        before = [p.clone() for p in pipe.model.parameters()]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.train_step(*case.args, target=case.target, loss_fn=case.loss_fn)
        optimizer.step()
        after = list(pipe.model.parameters())
    # All but the biases before a BatchNorm, whose gradients are only rounding, if that.
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert moved >= len(before) - 5


def test_automatic_choices_are_the_plans(pipe: ps.Pipeline) -> None:
    with make(mlp(8, 8, 8), m="auto") as auto:
        split = [c for c in auto.plan.considered if c.way == "pipeline"]
        best = min(c.predicted_step_seconds or 0.0 for c in split)
        assert auto.plan.predicted_step_seconds <= 1.003 * best
    assert pipe.plan.num_microbatches == 3
    warned = str(pipe.plan).startswith(("One device alone", "Data parallelism"))
    assert warned or pipe.plan.is_worth_it


def test_a_memory_limit_is_kept_by_recomputing() -> None:
    model, twin = mlp(*[32] * 9), mlp(*[32] * 9)
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    ask: dict[str, Any] = {"devices": ["cpu", "cpu"], "num_microbatches": 4, "schedule": "gpipe"}
    ask["cuts"] = ["8"]
    with ps.Pipeline(twin, (x,), **ask, replicas=1) as free:
        held = max(stage.held_bytes for stage in free.plan.stages)
        peak = max(stage.memory_bytes for stage in free.plan.stages)
        free.train_step(x, target=y, loss_fn=F.mse_loss)
    limit = peak - held
    with ps.Pipeline(model, (x,), memory_limit=f"{limit}B", **ask, replicas=1) as pipe:
        assert any(stage.recompute for stage in pipe.plan.stages)
        assert max(stage.memory_bytes for stage in pipe.plan.stages) <= limit
        pipe.train_step(x, target=y, loss_fn=F.mse_loss)
    assert_same_gradients(model, twin)
    with pytest.raises(ps.PlanError, match="no plan fits the memory"):
        ps.Pipeline(model, (x,), memory_limit=1000, **ask, replicas=1)


def test_a_module_of_a_sequential_used_in_several_stages() -> None:
    """Its parameters travel between stages; `0.weight` is no name in Python."""
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 8), shared, nn.Linear(8, 8), shared)
    x = torch.randn(6, 8)
    report = ps.verify(
        model,
        (x,),
        target=x,
        loss_fn=nn.functional.mse_loss,
        devices=["cpu", "cpu"],
        num_microbatches=3,
        cuts=["4"],
        replicas=1,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zero-bubble-v", "fitted"])
def test_weight_halves_are_put_off_where_the_plan_says_so(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(mlp(*[8] * 8), p=2, m=4, schedule=schedule) as found:
        plan = found.plan
    if schedule == "fitted":
        workers = range(len(plan.stages))
        depths = tuple(2 * (len(workers) - s) - 1 for s in workers)
        plan = msgspec.structs.replace(
            plan, schedule="fitted", rules=Rules(in_flight=depths, lead=depths, split=True)
        )
    put_off: list[int] = []
    weight = Stage.weight_backward

    def watched(stage: Stage, microbatch: int) -> None:
        put_off.append(len(stage.deferred.get(microbatch, ())))
        weight(stage, microbatch)

    monkeypatch.setattr(Stage, "weight_backward", watched)
    with ps.Pipeline(mlp(*[8] * 8), (X,), devices=["cpu"] * 2, plan=plan, audit=None) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)  # it learns which calls are products
        put_off.clear()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert plan.splits_backward is (schedule != "1f1b")
    assert sum(put_off) == (4 * 7 if plan.splits_backward else 0)  # every layer, every micro-batch
