"""Every optimizer of torch.optim, and every scheduler: in parts what it is whole, bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler

import penstock as ps
from penstock.comparison.reference import run_with_threads
from tests.support.models import mlp, uniform_plan
from tests.support.pool import pooled

X, Y = torch.randn(9, 6), torch.randn(9, 6)

# Every class, with what it needs besides the defaults; a new one in torch is missing here.
OPTIONS: dict[str, dict[str, Any]] = {
    "Adafactor": {"weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 1.0},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
OTHERS = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base class; what is refused; what is for sparse gradients, below."""


def classes() -> dict[str, type[Optimizer]]:
    """All that torch.optim has."""
    found = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    return {name: kind for name, kind in found.items() if inspect.isclass(kind)}


def variants() -> list[Any]:
    """Every class as it is, and in the implementations that it can be asked for."""
    found = []
    for name, options in OPTIONS.items():
        arguments = inspect.signature(classes()[name]).parameters
        for way in ("foreach", "fused", "maximize", None):
            if way is None or way in arguments:
                more = {} if way is None else {way: True}
                found.append(pytest.param(name, options | more, id=f"{name}-{way or 'plain'}"))
    return found


@pytest.fixture(scope="module", params=["threads", "processes"])
def pipe(request: pytest.FixtureRequest) -> Iterator[ps.Pipeline]:
    """One for all tests; its weights are what the tests before have made of them."""
    torch.manual_seed(1)
    model = mlp(6, 6, 6, 6)
    program = ps.capture(model, (X,))
    options: dict[str, Any] = {"plan": uniform_plan(program, 2, 2), "devices": ["cpu"] * 2}
    with (
        pooled(),
        ps.Pipeline(
            model, (X,), program=program, workers=request.param, **options, replicas=1
        ) as made,
    ):
        yield made


def train(pipe: ps.Pipeline, ours: Optimizer, twin: nn.Module, theirs: Optimizer) -> torch.Tensor:
    """One step of both optimizers on the same gradients; then everything is the same."""
    ours.zero_grad()
    theirs.zero_grad()
    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    for a, b in zip(pipe.parameters(), twin.parameters(), strict=True):
        b.grad = a.grad.clone()
    ours.step()
    run_with_threads(theirs.step, 1)
    for (name, a), b in zip(pipe.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name
    return loss


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Of optimizers or schedulers, as their state dicts have it."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same_state(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        for a, b in zip(ours, theirs, strict=True):
            assert_same_state(a, b)
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def reset(pipe: ps.Pipeline) -> nn.Module:
    """Let the pipeline have its first weights again; a copy of the model."""
    torch.manual_seed(1)
    pipe.load_state_dict(mlp(6, 6, 6, 6).state_dict())
    pipe.zero_grad()
    return copy.deepcopy(pipe.model)


def matrices(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def groups(model: Any, name: str) -> list[dict[str, Any]]:
    """Two groups, in each of which every stage has something; one for matrices alone."""
    if name == "Muon":
        return [{"params": matrices(model)[:2], "lr": 0.02}, {"params": matrices(model)[2:]}]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices(model), "lr": 0.02}, {"params": rest}]


def test_every_class_is_here() -> None:
    assert set(classes()) == {*OPTIONS, *OTHERS}


@pytest.mark.parametrize(("name", "options"), variants())
def test_equal_to_the_plain_one(pipe: ps.Pipeline, name: str, options: dict[str, Any]) -> None:
    """Over several steps, in groups, and with the state going from one to the other and back."""
    kind, twin = classes()[name], reset(pipe)
    ours = pipe.optimizer(kind, groups(pipe.model, name), **options)
    theirs = kind(groups(twin, name), **options)
    for _ in range(2):
        train(pipe, ours, twin, theirs)
    assert_same_state(ours.state_dict(), theirs.state_dict())

    plain = kind(groups(twin, name), **options)
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(pipe, ours, twin, plain)
    again = pipe.optimizer(kind, groups(pipe.model, name), **options)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(pipe, again, twin, plain)
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))  # over what it remembers
    train(pipe, ours, twin, plain)
    assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_names_and_rates_that_are_tensors(pipe: ps.Pipeline, name: str) -> None:
    kind, twin = classes()[name], reset(pipe)
    ours = pipe.optimizer(kind, pipe.named_parameters(), lr=torch.tensor(0.1))
    theirs = kind(twin.named_parameters(), lr=torch.tensor(0.1))
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (ours, theirs)]
    for _ in range(3):
        train(pipe, ours, twin, theirs)
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"].item() == pytest.approx(0.0125)
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert ours.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def _one_after_the_other(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def _both(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": _one_after_the_other,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": _both,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "LRScheduler": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
}


def test_every_scheduler_is_here() -> None:
    assert set(lr_scheduler.__all__) == set(SCHEDULERS)


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers(pipe: ps.Pipeline, name: str) -> None:
    """Also those that move the momentum."""
    twin, options = reset(pipe), {"lr": 0.05, "momentum": 0.8}
    ours = pipe.optimizer(torch.optim.SGD, groups(pipe.model, "SGD"), **options)
    theirs = torch.optim.SGD(groups(twin, "SGD"), **options)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    seen = set()
    for _ in range(4):
        loss = train(pipe, ours, twin, theirs)
        seen.add(tuple((g["lr"], g["momentum"]) for g in ours.param_groups))
        for scheduler in schedulers:
            scheduler.step(loss) if name == "ReduceLROnPlateau" else scheduler.step()
    assert len(seen) > 1
    if name in ("OneCycleLR", "CyclicLR"):
        assert len({momentum for each in seen for _, momentum in each}) > 1
    settings = [[g["lr"] for g in o.param_groups] for o in (ours, theirs)]
    assert settings[0] == settings[1]


def test_one_cycle_of_betas(pipe: ps.Pipeline) -> None:
    twin = reset(pipe)
    ours, theirs = pipe.optimizer(torch.optim.AdamW), torch.optim.AdamW(twin.parameters())
    schedulers = [lr_scheduler.OneCycleLR(o, 0.1, total_steps=6) for o in (ours, theirs)]
    for _ in range(4):
        train(pipe, ours, twin, theirs)
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"] != (0.9, 0.999)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 6, sparse=True)
        self.head = nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_sparse_gradients() -> None:
    """With threads; worker processes say that they have none."""
    tokens = torch.randint(16, (9,))
    for workers in ("threads", "processes"):
        torch.manual_seed(1)
        model = Sparse()
        twin = copy.deepcopy(model)
        program = ps.capture(model, (tokens,))
        plan = uniform_plan(program, 2, 2)
        with (
            pooled(),
            ps.Pipeline(
                model, (tokens,), program=program, plan=plan, devices=["cpu"] * 2, workers=workers
            ) as pipe,
        ):
            if workers == "processes":
                with pytest.raises(ps.InputError, match="has a sparse gradient, which only"):
                    pipe.train_step(tokens, target=Y, loss_fn=F.mse_loss)
                continue
            ours = pipe.optimizer(torch.optim.SparseAdam, [model.embedding.weight], lr=0.1)
            theirs = torch.optim.SparseAdam([twin.embedding.weight], lr=0.1)
            for _ in range(3):
                train_sparse(pipe, tokens, ours, twin, theirs)


def train_sparse(
    pipe: ps.Pipeline, tokens: torch.Tensor, ours: Optimizer, twin: Any, theirs: Optimizer
) -> None:
    pipe.zero_grad()
    pipe.train_step(tokens, target=Y, loss_fn=F.mse_loss)
    twin.embedding.weight.grad = pipe.model.embedding.weight.grad.clone()
    assert twin.embedding.weight.grad.is_sparse
    ours.step()
    theirs.step()
    assert torch.equal(pipe.model.embedding.weight, twin.embedding.weight)
