"""What threads, processes and the ranks of torchrun do in mixed precision, to be compared."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import uniform_plan

Found = dict[str, Any]
"""Losses and results, gradients by name, states."""

X = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(11, 6, generator=torch.Generator().manual_seed(2))


class Island(nn.Module):
    """Autocast is off in the midst of it, and a dtype is read."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.inner, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).relu())
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x.float())
        x = self.norm(x).tanh()
        wanted = self.last(x).dtype
        x = self.third(x).tanh()
        return self.last(x.to(wanted) * 1.1)


def island(dropout: float = 0.2) -> nn.Module:
    """The same every time."""
    torch.manual_seed(4)
    return Island(dropout)


def pipe_of(
    model: nn.Module,
    schedule: str = "1f1b",
    recompute: str = "auto",
    microbatches: int = 3,
    cuts: Any = None,
    **options: Any,
) -> ps.Pipeline:
    """A pipeline on two workers."""
    program = ps.capture(model, (X.to(next(model.parameters()).dtype),))
    plan = uniform_plan(program, 2, microbatches, schedule, cuts, recompute)
    return ps.Pipeline(model, program=program, plan=plan, **options)


def gradients(pipe: ps.Pipeline) -> dict[str, torch.Tensor]:
    """Those that are here."""
    return {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}


def autocast(options: dict[str, Any]) -> Found:
    """A step of each style under autocast, the second with its backward outside; and without."""
    with pipe_of(island(), recompute="all", **options) as pipe:
        losses = []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
                loss = F.mse_loss(pipe(X), Y)
            loss.backward()
            losses.append(loss.detach())
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        return {"losses": losses, "gradients": gradients(pipe)}


SCALE = {"init_scale": 2.0**19, "growth_interval": 2}
"""So large that some steps are left out, and growing soon."""


def scaled(options: dict[str, Any]) -> Found:
    """Steps of both styles with one scaler; in some, gradients of only one stage overflow."""
    with pipe_of(island(), **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        scaler = pipe.scaler(**SCALE)
        losses, scales = [], []
        for step in range(9):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                if step % 3:
                    for _ in range(step % 3):
                        loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=scaler)
                else:
                    loss = F.mse_loss(pipe(X), Y)
            if step % 3 == 0:
                scaler.scale(loss).backward()
            if step == 6 and pipe.model.last.weight.grad is not None:  # in the last stage
                pipe.model.last.weight.grad[0, 0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                losses.append(pipe.clip_grad_norm_(0.01).nan_to_num(-1.0))
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
        found = {"losses": losses, "scales": scales, "scaler": scaler.state_dict()}
        return {**found, "gradients": gradients(pipe), "state": dict(pipe.state_dict())}


def halved() -> nn.Module:
    """All in bfloat16."""
    torch.manual_seed(6)
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6)).to(torch.bfloat16)


X16, Y16 = X.to(torch.bfloat16), Y.to(torch.bfloat16)


def masters(options: dict[str, Any]) -> Found:
    """Steps with master weights, and the same again from a saved state."""
    with pipe_of(halved(), **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-4, master_weights=True)
        losses = []

        def step() -> None:
            optimizer.zero_grad()
            losses.append(pipe.train_step(X16, target=Y16, loss_fn=F.mse_loss))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()

        for _ in range(3):
            step()
        saved = copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))
        step()
        pipe.load_state_dict(saved[0])
        again = pipe.optimizer(torch.optim.AdamW, lr=1.0, master_weights=True)
        again.load_state_dict(saved[1])
        optimizer = again
        step()
        assert torch.equal(losses[-1], losses[-2])
        state = {str(k): v for k, v in optimizer.state_dict()["state"].items()}
        found = {"losses": losses, "optimizer": state, "state": dict(pipe.state_dict())}
        return {**found, "gradients": gradients(pipe)}


def narrow(options: dict[str, Any]) -> Found:
    """Boundaries in bfloat16: with and without autocast, both styles, and evaluation."""
    losses: list[torch.Tensor] = []
    for schedule in ("1f1b", "interleaved"):
        pipe = pipe_of(island(), schedule, boundary_dtype=torch.bfloat16, **options)
        with pipe:
            losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            with torch.autocast("cpu", torch.float16):
                losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            x = X.clone().requires_grad_()
            F.mse_loss(pipe(x), Y).backward()
            with torch.no_grad():
                losses.append(pipe.eval()(X))
            assert all(link.endswith(", in bfloat16") for link in pipe.links)
            found = gradients(pipe)
    return {"losses": losses, "gradients": found}


STEPS = [autocast, scaled, masters, narrow]


def everything(options: dict[str, Any]) -> dict[str, Found]:
    """All of it, by name."""
    found = {}
    for steps in STEPS:
        torch.manual_seed(3)
        found[steps.__name__] = steps(options)
    return found
