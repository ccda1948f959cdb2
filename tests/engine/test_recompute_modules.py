"""Recomputing just the modules that were named."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from penstock.engine.span import Rerun
from penstock.engine.stage import Stage
from penstock.plan.request import spans
from tests.plan.test_limits import hungry
from tests.support.models import uniform_plan

X, Y = torch.randn(12, 8), torch.randn(12, 8)
LABELS = ("stem", "a.0", "a.1.conv", "a.1.add()", "b", "stem", "head.0", "head.1")


pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["a.1"], ((2, 4),)),
        (["head", "a"], ((1, 4), (6, 8))),
        (["a", "a.1", "a.0", "a"], ((1, 4),)),
        (["stem"], ((0, 1), (5, 6))),
        ([], ()),
    ],
)
def test_the_calls_of_modules(modules: list[str], expected: Any) -> None:
    assert spans(LABELS, {}, modules) == expected


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["haed"], "no call of the program is in a module named 'haed'; there are 'head'"),
        (["b.linear"], "recompute 'b.linear': it is inside 'b', which is one call .*; recompute"),
        (["a"], "'a' cannot be recomputed on its own, .* where it begins: a view"),
        (["stem"], "'stem' cannot be recomputed on its own, .* where it ends: a view"),
    ],
)
def test_modules_that_cannot_be(modules: list[str], message: str) -> None:
    with pytest.raises(ps.PlanError, match=message):
        spans(LABELS, {1: "a view"}, modules)


def test_a_plan_recomputes_just_these() -> None:
    labels = [f"{'abcdef'[k // 2]}.{k % 2}" for k in range(12)]
    asked: dict[str, Any] = {"num_microbatches": 4, "schedule": "1f1b", "recompute": ["e", "b"]}
    plan = ps.plan(hungry(labels=tuple(labels)), **asked, replicas=1)
    assert [span for s in plan.stages for span in s.recompute] == [(2, 4), (8, 10)]
    free = ps.plan(hungry(labels=tuple(labels)), **(asked | {"recompute": "none"}), replicas=1)
    assert plan.predicted_step_seconds > free.predicted_step_seconds

    # A cut inside a module leaves a part of it to either stage.
    cut = ps.plan(hungry(labels=tuple(labels)), cuts=[9], **asked, replicas=1)
    assert [stage.recompute for stage in cut.stages] == [((2, 4), (8, 9)), ((9, 10),)]

    # What is held is known: a limit is kept, or the error says that it is not.
    for names in (["b"], ["a", "b", "c", "d", "e", "f"]):
        again = asked | {"recompute": names}
        peak = max(
            s.memory_bytes
            for s in ps.plan(hungry(labels=tuple(labels)), **again, replicas=1).stages
        )
        plan = ps.plan(
            hungry(labels=tuple(labels)), memory_limit=round(1.1 * peak), **again, replicas=1
        )
        assert max(s.memory_bytes for s in plan.stages) <= 1.1 * peak
        with pytest.raises(ps.PlanError, match="no plan fits the memory"):
            ps.plan(hungry(labels=tuple(labels)), memory_limit=peak // 4, **again, replicas=1)


@pytest.mark.parametrize("recompute", ["some", ["a", 3], 3, {"a"}])
def test_what_is_no_list_of_modules(recompute: Any) -> None:
    with pytest.raises(ps.InputError, match=r"or a list of modules$|not a list of modules; write"):
        ps.plan(hungry(), recompute=recompute, replicas=1)


class Counted(nn.Module):
    """Counts its forwards in a buffer, and in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        with self.path.open("ab") as file:
            file.write(b".")
        return x * 1


def model(path: Path) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), Counted(path))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_exact_and_nothing_counts_twice(tmp_path: Path, workers: str) -> None:
    """The forwards of two of four modules run twice; masks repeat, and buffers do not notice."""
    path = tmp_path / "forwards"
    mine, twin = model(path), model(path)
    program = ps.capture(mine, (X,))
    plan = uniform_plan(program, 2, 3, cuts=[10], recompute=["1", "2"])
    plan.save(tmp_path / "plan.json")
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "plan": tmp_path / "plan.json"}
    options["audit"] = None  # whose forwards would count
    with ps.Pipeline(mine, (X,), program=program, workers=workers, **options, replicas=1) as pipe:
        assert [s.recompute for s in pipe.plan.stages] == [((5, 10),), ((10, 15),)]
        path.write_bytes(b"")
        for _ in range(2):
            loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert len(path.read_bytes()) == 2 * 3 * (4 + 2)
    reference = one_device(twin, program, 3, (X,), {})
    steps = [
        run_with_threads(lambda k=k: reference.train_step(k, F.mse_loss, Y), 1) for k in (0, 1)
    ]
    assert torch.equal(loss, steps[1])
    for (name, a), b in zip(mine.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(mine.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert [int(block[4].count) for block in mine] == [6] * 4


class Holder:
    """Stands for a tensor that autograd has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


def held(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> tuple[float, float]:
    """How many activations the first of two stages holds at its peak: measured, and as planned."""
    torch.manual_seed(1)
    net = nn.Sequential(
        *(
            nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
            for _ in range(8)
        )
    )
    x = torch.randn(512, 64)
    saved: weakref.WeakSet[Holder] = weakref.WeakSet()
    found: list[int] = []
    forward, backward = Stage.forward, Stage.backward

    def noted(tensor: torch.Tensor) -> Holder:
        holder = Holder(tensor)
        saved.add(holder)
        return holder

    def noting(stage: Stage, microbatch: int) -> None:
        watched = saved_tensors_hooks(noted, lambda holder: holder.tensor)
        with watched if stage.index == 0 else nullcontext():
            forward(stage, microbatch)

    def counting(stage: Stage, microbatch: int) -> None:
        if stage.index == 0:
            recipes = [p for h in stage.held.values() for p in h.inner if isinstance(p, Rerun)]
            tensors = [value for recipe in recipes for value in recipe.values]
            tensors += [holder.tensor for holder in saved]
            own = {p.data_ptr() for p in net.parameters()}
            sizes = {t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in own}
            found.append(sum(sizes.values()))
        backward(stage, microbatch)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "forward", noting)
        patch.setattr(Stage, "backward", counting)
        asked: dict[str, Any] = {"schedule": "gpipe", "cuts": ["4"], "recompute": recompute}
        asked["audit"] = None
        devices = ["cpu"] * 2
        with ps.Pipeline(
            net, (x,), devices=devices, num_microbatches=4, **asked, replicas=1
        ) as pipe:
            found.clear()  # what profiling has held
            pipe.train_step(x, loss_fn=lambda output: output.square().mean())
    unit = 512 * 64 * 4  # bytes of an activation of the whole batch
    return found[0] / unit, 4 * pipe.plan.stages[0].held_bytes / unit


def test_memory_falls_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a stage's four modules saves three activations; recomputed, only what enters it.

    The plan counts twice what enters a span that is kept, and is saved by its first call.
    """
    assert held(monkeypatch, "none") == (13, 14)
    assert held(monkeypatch, ["1", "2"]) == (9, 11)
    assert held(monkeypatch, ["0", "1", "2", "3"]) == (4, 4)
    assert held(monkeypatch, "all") == (1, 1)


def test_names_are_checked_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planning.planner.cached_profiles", None)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ps.PlanError, match="in a module named 'layer1'; there are '0', '1'"):
        ps.Pipeline(net, (X,), devices=["cpu"] * 2, recompute=["layer1"], replicas=1)


class Energy(nn.Module):
    """Adds the gradient of an energy, computed in its forward, which also counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x.detach().requires_grad_()
        energy = self.linear(y).tanh().square().sum() * self.calls
        (gradient,) = torch.autograd.grad(energy, y, create_graph=True)
        return x + gradient


def test_a_module_that_computes_gradients_in_its_forward() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Sequential(nn.ELU(inplace=True), Energy()),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
    )
    twin = copy.deepcopy(model)
    for _ in range(2):
        for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
            (F.mse_loss(twin(x), y) / 3).backward()
    with ps.Pipeline(
        *(model, (X,)), devices=["cpu", "cpu"], num_microbatches=3, workers="threads",
        recompute=["1"],
     replicas=1) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert torch.equal(model[1][1].calls, twin[1][1].calls)
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
