"""Running statistics of whole batches, frozen layers, optimizers and averages, on any workers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock as ps
from penstock.engine.batchnorm import BatchNormMode
from tests.support.models import replicated, uniform_plan

X, Y = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(11, 6)
KINDS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.AdamW: {"lr": 0.01, "foreach": True},
    torch.optim.Adafactor: {"lr": 0.01},
    torch.optim.SGD: {"lr": 0.01, "momentum": 0.9, "fused": True},
}


def norms(
    options: dict[str, Any],
    stages: int = 2,
    replicas: int = 1,
    batchnorm: BatchNormMode = "deferred",
    recompute: Any = ("0", "3"),
) -> dict[str, Any]:
    """Steps with each of some optimizers; first with half of the model frozen, then without."""
    torch.manual_seed(4)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    names = [f"{k}.1" for k in range(4)]
    program = ps.capture(model, (X,), keep_closed=names)
    plan = replicated(uniform_plan(program, stages, 3, recompute=recompute), replicas)
    losses: list[torch.Tensor] = []
    with ps.Pipeline(
        model, (X,), program=program, plan=plan, batchnorm=batchnorm, **options
    ) as pipe:
        average = AveragedModel(pipe.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for number, (kind, settings) in enumerate(KINDS.items()):
            model[:2].requires_grad_(number > 0)
            optimizer = pipe.optimizer(kind, **settings)
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
                losses.append(pipe.clip_grad_norm_(1.0))
                optimizer.step()
                average.update_parameters(pipe.model)
        losses.append(pipe(X).detach())
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {
            "losses": losses,
            "gradients": found,
            "state": copy.deepcopy(pipe.state_dict()),
            "average": copy.deepcopy(pipe.state_dict(of=average.module)),
            "optimizer": {str(k): v for k, v in optimizer.state_dict()["state"].items()},
        }
