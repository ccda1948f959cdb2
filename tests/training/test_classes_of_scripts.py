"""Optimizers whose class is defined in the script, and those whose step fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import penstock as ps
from penstock.errors import InputError, WorkerError

pytestmark = pytest.mark.usefixtures("pool")

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def made(workers: Any, **options: Any) -> tuple[nn.Module, ps.Pipeline]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    asked: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, **options}
    return model, ps.Pipeline(model, (X,), devices=["cpu"] * 2, workers=workers, **asked)


def own_class() -> type[Optimizer]:
    """Of a class that is sent by value, as one that a script defines is."""

    class Descent(Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"])

    return Descent


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_class_of_the_script(workers: str) -> None:
    model, pipe = made(workers)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with pipe:
        optimizer = pipe.optimizer(own_class(), lr=0.1)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.step()
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        (F.mse_loss(reference(x), y) / 2).backward()
    plain.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


class Failing(torch.optim.SGD):
    """Fails once it is asked to."""

    def __init__(self, parameters: Any, lr: float, fails: bool = False) -> None:
        super().__init__(parameters, lr=lr)
        self.defaults["fails"] = fails
        for group in self.param_groups:
            group.setdefault("fails", fails)

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["fails"]:
            raise KeyError("on purpose")
        super().step()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_step_that_fails_leaves_a_pipeline_that_works(workers: str, replicas: int) -> None:
    _, pipe = made(workers, replicas=replicas)
    with pipe:
        optimizer = pipe.optimizer(Failing, lr=0.1)
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.param_groups[0]["fails"] = True
        with pytest.raises(WorkerError, match="failed in the optimizer step: KeyError"):
            optimizer.step()
        optimizer.param_groups[0]["fails"] = False
        optimizer.zero_grad()
        before = pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.step()
        assert pipe.eval_step(X, target=Y, loss_fn=F.mse_loss) < before


class Holding(nn.Module):
    """Waits amid a forward, if it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if HOLDS.is_set():
            BEGUN.set()
            GO_ON.wait(60)
        return self.linear(x)


HOLDS, BEGUN, GO_ON = threading.Event(), threading.Event(), threading.Event()


def test_another_thread_has_to_wait_for_a_pass(tmp_path: Path) -> None:
    model = nn.Sequential(Holding(), nn.Linear(4, 4))
    options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1, "keep_closed": ["0"]}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        HOLDS.set()
        step = threading.Thread(
            target=pipe.train_step, args=(X,), kwargs={"target": Y, "loss_fn": F.mse_loss}
        )
        step.start()
        assert BEGUN.wait(60)
        for work in (
            optimizer.step,
            lambda: pipe.save(tmp_path / "saved"),
            lambda: pipe.clip_grad_norm_(1.0),
        ):
            with pytest.raises(InputError, match="another thread is using this pipeline"):
                work()
        HOLDS.clear()
        GO_ON.set()
        step.join()
        optimizer.step()
        pipe.save(tmp_path / "saved")
        with pytest.raises(InputError, match="give a function of one dictionary"):
            pipe.on_step(3)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="is not a state of random numbers"):
            pipe.load_random_state({"seed": 1, "trained": -1, "others": 2})
