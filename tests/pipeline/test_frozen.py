"""Layers that are frozen, for good or for some steps: no backward runs that nobody needs."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from penstock.engine.span import Rerun
from tests.support.models import uniform_plan

X, Y = torch.randn(11, 6), torch.randn(11, 6)
KINDS = ["threads", "processes"]


pytestmark = pytest.mark.usefixtures("pool")


class Noted(nn.Module):
    """The identity; every forward leaves a byte in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.path.open("ab") as file:
            file.write(b".")
        return x * 1


class Scaled(nn.Module):
    """Has a parameter that no forward uses, and none that asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(6))
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def blocks(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, *more)


def pipeline(model: nn.Module, cuts: list[int] | None = None, **options: Any) -> ps.Pipeline:
    """In two stages and three micro-batches; nothing is measured."""
    asked = {k: options.pop(k) for k in ("schedule", "recompute") if k in options}
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 3, cuts=cuts, **asked)
    return ps.Pipeline(model, (X,), program=program, plan=plan, devices=["cpu"] * 2, **options)


def freeze(model: nn.Module, frozen: tuple[int, ...]) -> None:
    for number, block in enumerate(model.children()):
        block.requires_grad_(number not in frozen)


@pytest.mark.parametrize("workers", KINDS)
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("zero-bubble", "all"), ("interleaved", "all")]
)
def test_toggled_between_steps(workers: str, schedule: str, recompute: str) -> None:
    """Parameters that are frozen for a while keep their optimizer's state, and stay as they are."""
    model = blocks(Scaled())
    freeze(model, (0, 1, 4))
    twin = copy.deepcopy(model)
    with pipeline(model, schedule=schedule, recompute=recompute, workers=workers) as pipe:
        reference = one_device(twin, pipe.program, 3, (X,), {})
        ours = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
        for step, frozen in enumerate([(0, 1), (), (0, 1, 2), (3,), (2, 3), (0, 1)]):
            for each, optimizer in ((model, ours), (twin, theirs)):
                freeze(each, (*frozen, 4))
                optimizer.zero_grad()
            loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            step_alone = lambda s=step: reference.train_step(s, F.mse_loss, Y)  # noqa: E731
            assert torch.equal(loss, run_with_threads(step_alone, 1))
            ours.step()
            theirs.step()
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(p, q), name
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.equal(p.grad, q.grad), name
        states = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        assert not {8, 9} & states[0].keys()  # those of `Scaled`


@pytest.mark.parametrize("recompute", ["none", "all", "boundaries"])
def test_a_frozen_half_has_no_backward(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """Autograd is only called by the second worker, and the first one holds nothing for it."""
    model = blocks()
    freeze(model, (0, 1))
    called: list[str] = []
    held: list[Any] = []
    backward = torch.autograd.backward

    def noted(*args: Any, **kwargs: Any) -> None:
        called.append(threading.current_thread().name)
        backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", noted)
    with pipeline(model, [6], schedule="gpipe", recompute=recompute, audit=None) as pipe:
        stage = pipe._runner.workers._assemblies[True][0].stages[0]

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            for inner, end in stage.held.values():
                held.extend(p for p in inner if isinstance(p, Rerun))
                held.extend(root for root in end.roots if root is not None)
                held.extend(end.entry.differentiable)
            return F.mse_loss(output, target)

        pipe.train_step(X, target=Y, loss_fn=loss_fn)
        assert set(called) == {"penstock-1"}
        assert held == []
        freeze(model, ())
        pipe.train_step(X, target=Y, loss_fn=loss_fn)
        assert set(called) == {"penstock-0", "penstock-1"}
        assert held != []


@pytest.mark.parametrize("workers", KINDS)
def test_a_frozen_half_is_not_run_again(tmp_path: Path, workers: str) -> None:
    """Whatever is to be recomputed."""
    path = tmp_path / "forwards"
    model = nn.Sequential(nn.Linear(6, 6), Noted(path), *blocks())
    model[0].requires_grad_(False)
    with pipeline(model, [2], recompute="all", workers=workers, audit=None) as pipe:
        found = []
        for wanted in (False, True, False):
            model[0].requires_grad_(wanted)
            path.write_bytes(b"")
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            F.mse_loss(pipe(X), Y).backward()
            found.append(len(path.read_bytes()))
    assert found == [6, 12, 6]


@pytest.mark.parametrize("workers", KINDS)
def test_stages_without_parameters(workers: str) -> None:
    """The first stage has none, or the last, which then passes gradients on."""
    for model, cut in (
        (nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), 1),
        (nn.Sequential(nn.Linear(6, 6), nn.Tanh()), 1),
    ):
        twin = copy.deepcopy(model)
        with pipeline(model, [cut], workers=workers, recompute="all") as pipe:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
            optimizer.step()
            assert len(optimizer.state_dict()["state"]) == 2
        reference = one_device(twin, pipe.program, 3, (X,), {})
        run_with_threads(lambda r=reference: r.train_step(0, F.mse_loss, Y), 1)
        torch.optim.Adam(twin.parameters(), lr=0.1).step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            assert torch.equal(p, q)


@pytest.mark.parametrize("workers", KINDS)
def test_everything_frozen_is_an_error(workers: str) -> None:
    with pipeline(blocks().requires_grad_(False), workers=workers) as pipe:
        with pytest.raises(ps.InputError, match="depends on no parameter that requires a grad"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert not pipe(X).requires_grad
        pipe.model.requires_grad_(True)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert all(p.grad is not None for p in pipe.parameters())
