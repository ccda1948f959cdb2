"""What both threads and the ranks of torchrun do, so that the outcomes can be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.trees import flatten
from tests.support.models import cases, replicated, uniform_plan
from tests.workers.ranks.norms import norms

Found = dict[str, Any]
"""Losses and results, gradients by name, the state of model and optimizer."""

EXACT = [("named", "1f1b"), ("named", "interleaved"), ("unet", "zero-bubble"), ("unet", "gpipe")]
LARGER = [
    (name, schedule)
    for name in ("gpt2", "vit", "resnet50")
    for schedule in ("1f1b", "interleaved", "zero-bubble")
]
X, Y = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(11, 6)


def gradients(pipe: ps.Pipeline) -> dict[str, torch.Tensor]:
    """Those that are here."""
    return {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}


def small() -> nn.Module:
    """Linear layers with BatchNorm and dropout, a tied weight, and a bias without a gradient."""
    torch.manual_seed(4)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    blocks[2][0].bias.requires_grad_(False)
    return nn.Sequential(*blocks)


def small_pipe(stages: int = 2, replicas: int = 1, **options: Any) -> ps.Pipeline:
    """A pipeline of it."""
    model = small()
    program = ps.capture(model, (X,))
    plan = replicated(uniform_plan(program, stages, 3), replicas)
    return ps.Pipeline(model, (X,), program=program, plan=plan, **options)


def case_steps(name: str, schedule: str, options: dict[str, Any], all_data: bool) -> Found:
    """Two steps with an optimizer, and a result in evaluation mode."""
    case = cases()[name]
    model = case.model()
    program = ps.capture(model, case.args, case.kwargs)
    plan = uniform_plan(program, 2, 3, schedule)
    with ps.Pipeline(model, case.args, case.kwargs, program=program, plan=plan, **options) as pipe:
        torch.manual_seed(5)
        workers = pipe._runner.workers
        args, kwargs, rest = case.args, case.kwargs, {}
        if not (all_data or workers.role.has_inputs):
            args, kwargs = (), {}
        if all_data or workers.role.has_loss:
            rest = {"target": case.target, "loss_fn": case.loss_fn}
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.train_step(*args, **rest, **kwargs))
            optimizer.step()
        found = {"gradients": gradients(pipe), "state": copy.deepcopy(pipe.state_dict())}
        with torch.no_grad():
            leaves = flatten(pipe.eval()(*args, **kwargs))[0]
        return {**found, "losses": losses, "results": leaves, "links": pipe.links}


def plain_style(pipe: ps.Pipeline) -> Found:
    """`loss.backward()`, with a gradient for the input, and two batches under way."""
    x = X.clone().requires_grad_()
    first, second = pipe(x), pipe(2 * X)
    F.mse_loss(second, Y).backward()
    F.mse_loss(first, Y).backward()
    found = [first.detach(), second.detach()]
    if pipe._runner.workers.role.has_inputs:
        assert x.grad is not None
    return {"losses": found, "gradients": gradients(pipe), "x": {"x": x.grad}}


def some_gradients(pipe: ps.Pipeline) -> Found:
    """`autograd.grad`, and a step without gradients: what is in `.grad` stays as it is."""
    x, named = X.clone().requires_grad_(), dict(pipe.named_parameters())
    losses = [pipe.train_step(X, target=Y, loss_fn=F.mse_loss)]
    before = gradients(pipe)
    loss = F.mse_loss(pipe(x), Y)
    ask = [x, *(parameter for parameter in named.values() if parameter.requires_grad)]
    of_x, *found = torch.autograd.grad(loss, ask, allow_unused=True)
    with torch.no_grad():
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
    losses += [torch.tensor(number) for number in pipe.random_state().values()]
    after = gradients(pipe)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    if pipe._runner.workers.role.has_inputs:
        assert of_x is not None
    names = [name for name, parameter in named.items() if parameter.requires_grad]
    taken = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    return {"losses": losses, "gradients": taken, "x": {"x": of_x}}


def sizes_vary(pipe: ps.Pipeline) -> Found:
    """Batches of other sizes, micro-batches by hand, accumulation."""
    losses = []
    for rows in (11, 8, 11, 6, 9):
        losses.append(pipe.train_step(X[:rows], target=Y[:rows], loss_fn=F.mse_loss))
    parts = [(X[:2],), (X[2:9],), (X[9:],)]
    targets = [Y[:2], Y[2:9], Y[9:]]
    losses.append(pipe.train_microbatches(parts, targets=targets, loss_fn=F.mse_loss))
    weight = lambda target: float(len(target) ** 2)  # noqa: E731
    losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss, weight=weight))
    return {"losses": losses, "gradients": gradients(pipe)}


def optimizers(pipe: ps.Pipeline) -> Found:
    """AdamW in groups, a scheduler, clipping, state dicts there and back."""
    named = list(pipe.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.3},
        {"params": [p for n, p in named if "weight" not in n]},
    ]
    optimizer = pipe.optimizer(torch.optim.AdamW, groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        losses.append(pipe.clip_grad_norm_(0.05))
        optimizer.step()
        schedule.step()

    for _ in range(3):
        step()
    losses.append(pipe.clip_grad_norm_(1.0, float("inf")))
    saved = copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))
    step()
    pipe.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    step()
    return {
        "losses": losses,
        "gradients": gradients(pipe),
        "state": copy.deepcopy(pipe.state_dict()),
        "optimizer": {str(k): v for k, v in optimizer.state_dict()["state"].items()},
    }


SMALL: list[Callable[[ps.Pipeline], Found]] = [plain_style, some_gradients, sizes_vary, optimizers]


def everything(options: dict[str, Any], exact: list[tuple[str, str]]) -> dict[str, Found]:
    """All of it, by name."""
    found = {}
    for number, (name, schedule) in enumerate(exact):
        found[f"{name}-{schedule}"] = case_steps(name, schedule, options, number % 2 == 0)
    found["norms"] = norms(options)
    for steps in SMALL:
        with small_pipe(**options) as pipe:
            torch.manual_seed(3)
            found[steps.__name__] = steps(pipe)
    return found
