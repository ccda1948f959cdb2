"""Boundaries in half precision: what crosses is rounded, once, and nothing else is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.links.casting import cast_back, cast_down
from penstock.profile.data import Link
from tests.support.models import cases, costs, mlp, uniform_plan
from tests.support.precision import X, Y

CPUS = ["cpu"] * 2


class Round(torch.autograd.Function):
    """Rounds a value on its way, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient.to(ctx.dtype).to(gradient.dtype), None


class Rounded(nn.Module):
    """Its model, rounded behind some layers."""

    def __init__(self, layers: nn.Module, cuts: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers, self.cuts, self.dtype = layers, cuts, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = Round.apply(x, self.dtype) if number in self.cuts else x
            x = layer(x)
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("schedule", "cuts"),
    [("1f1b", [2]), ("zero-bubble", [3]), ("interleaved", [1, 3, 4]), ("zero-bubble-v", [1, 3, 4])],
)
def test_just_what_crosses_is_rounded(dtype: torch.dtype, schedule: str, cuts: list[int]) -> None:
    """Also between two stages of one worker, so that the bits depend on the cuts alone."""
    torch.manual_seed(8)
    model = mlp(6, 6, 6, 6)
    twin = Rounded(copy.deepcopy(model), cuts, dtype)
    plan = uniform_plan(ps.capture(model, (X,)), 2, 3, schedule, cuts)
    devices: dict[str, Any] = {"devices": CPUS, "boundary_dtype": dtype}
    with ps.Pipeline(model, (X,), plan=plan, **devices) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

        def alone() -> None:
            for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
                (F.mse_loss(twin(x), y) * (len(x) / len(X))).backward()

        run_with_threads(alone, 1)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        with torch.no_grad():
            assert torch.equal(pipe(X), torch.cat([twin(x) for x in X.tensor_split(3)]))
        name = str(dtype).removeprefix("torch.")
        assert pipe.links == (f"by reference, in {name}",) * len(cuts)
        assert f"boundaries in {name}" in repr(pipe)


def test_what_is_not_wide_stays() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    values = (x, x.double(), x.half(), torch.arange(3), "text", None, x.detach().t())
    sent = cast_down(values, torch.bfloat16)
    assert sent[0].dtype is sent[1].dtype is torch.bfloat16
    assert sent[2] is values[2]
    back = cast_back(sent)
    assert [getattr(v, "dtype", v) for v in back] == [getattr(v, "dtype", v) for v in values]
    assert back[0].requires_grad
    assert not back[6].requires_grad
    assert back[6].stride() == values[6].stride()
    assert torch.equal(back[0], x.bfloat16().float())
    assert back[3] is values[3]


def test_it_is_a_part_of_the_plan(tmp_path: Path) -> None:
    case = cases()["named"]
    profile = msgspec.structs.replace(costs("named"), devices=("cpu", "cpu"))
    model = case.model()
    program = ps.capture(model, case.args, case.kwargs)
    options: dict[str, Any] = {"devices": CPUS, "program": program}
    with ps.Pipeline(
        *(model, case.args, case.kwargs),
        cuts=["second"],
        num_microbatches=2,
        schedule="1f1b",
        boundary_dtype=torch.bfloat16,
        **options,
        replicas=1,
    ) as pipe:
        pipe.plan.save(tmp_path / "plan.json")
    plan = ps.Plan.load(tmp_path / "plan.json")
    assert plan.boundary_dtype == "bfloat16"
    with ps.Pipeline(model, case.args, case.kwargs, plan=plan, **options) as pipe:
        assert pipe.links == ("by reference, in bfloat16",)
    assert "boundaries" not in str(ps.plan(profile, num_microbatches=2, replicas=1))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("bfloat16", "int4"))
    with pytest.raises(ps.PlanError, match="boundary_dtype='int4' is none of bfloat16, float16"):
        ps.Plan.load(tmp_path / "plan.json")


def test_the_planner_counts_the_bytes_that_travel() -> None:
    from penstock.plan import plans
    from penstock.plan.request import Request
    from penstock.profile.measure import bytes_across

    model = mlp(6, 6, 6, 6)
    program = ps.capture(model, (X,))
    whole, half = bytes_across(program), bytes_across(program, torch.float16)
    assert half == tuple(size / 2 for size in whole)
    slow = {"cpu>cpu": Link(latency_seconds=0.0, bytes_per_second=1e3)}
    profile = msgspec.structs.replace(ps.profile(program, devices=CPUS), links=slow, boundary=whole)
    request = Request(num_microbatches=2, schedule="1f1b", cuts=[2])
    wide = plans(profile, request)[0]
    thin = plans(msgspec.structs.replace(profile, travelling=half), request)[0]
    assert thin.stages[1].transfer_seconds == wide.stages[1].transfer_seconds / 2
    assert thin.stages[1].held_bytes == wide.stages[1].held_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "half"])
def test_what_is_wrong_is_said(dtype: Any) -> None:
    with pytest.raises(ps.InputError, match="is not supported; give bfloat16 or float16"):
        ps.Pipeline(mlp(6, 6, 6), (X,), devices=CPUS, boundary_dtype=dtype, replicas=1)
