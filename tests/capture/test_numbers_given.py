"""Numbers of Python's that are arguments, and change from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

X, Y = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)), torch.zeros(6, 4)


pytestmark = pytest.mark.usefixtures("pool", "one_thread")


Does = Callable[[Any, torch.Tensor, Any], torch.Tensor]


class Timed(nn.Module):
    """Does what a case wants with a number."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.inner, self.last = nn.Linear(6, 6), Inner(), nn.Linear(6, 4)
        self.does, self.temp = does, 1.0

    def forward(self, x: torch.Tensor, t: Any, *more: Any) -> torch.Tensor:
        x = self.does(self, self.first(x), t, *more)
        return self.last(x.tanh().to(torch.float32))


class Inner(nn.Module):
    """A module that stays closed, and takes the number."""

    def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
        return x / (1 + t * t)


def stepped(m: Any, x: torch.Tensor, t: float) -> torch.Tensor:
    return x * int(t * 4) if t > 2 else x + t


def embedded(m: Any, x: torch.Tensor, t: float) -> torch.Tensor:
    """As diffusion models do."""
    steps = torch.tensor([t], dtype=torch.float32) * torch.arange(1, 7)
    return x + steps.sin()


FLOATS = [0.3 * k for k in range(1, 15)]
INTEGERS = [*range(1, 15)]

FOLLOWED: dict[str, Does] = {
    "product": lambda m, x, t: x * t,
    "weak": lambda m, x, t: (x.half() * t).float(),
    "weak integers": lambda m, x, t: (x * 4).int() * t + x,
    "arithmetic": lambda m, x, t: x * (1 - t) ** 2 / (t + 1),
    "keyword": lambda m, x, t: torch.add(x, x, alpha=t),
    "filled": lambda m, x, t: x + torch.full((6,), t),
    "tensor": embedded,
    "closed": lambda m, x, t: m.inner(x, t),
    "unused": lambda m, x, t: x,
    "with an attribute": lambda m, x, t: x * (t + m.temp),
}
MOST = dict.fromkeys(FOLLOWED, 3) | {"with an attribute": 6}
DECIDING: dict[str, Does] = {
    "steps": stepped,
    "decision": lambda m, x, t: x.relu() if t > 2 else x * t,
    "root": lambda m, x, t: x * math.sqrt(t),
    "sizes": lambda m, x, t: x[:, : 1 + int(t) % 2].sum(-1, keepdim=True) + x,
    "type": lambda m, x, t: x * t if type(t) is float else x - t,
    "loop": lambda m, x, t: sum((x * k for k in range(int(t) % 4)), x),
    "in a dictionary": lambda m, x, t: x * {1: 2.0, 2: 3.0}.get(t, 4.0),
}


@pytest.mark.parametrize("values", [FLOATS, INTEGERS], ids=["floats", "integers"])
@pytest.mark.parametrize("name", [*FOLLOWED, *DECIDING])
def test_what_a_pipeline_gives_is_what_the_model_gives(name: str, values: list[Any]) -> None:
    compare({**FOLLOWED, **DECIDING}[name], values, "threads", MOST.get(name))


@pytest.mark.parametrize("name", ["product", "decision", "closed"])
def test_in_worker_processes(name: str) -> None:
    compare({**FOLLOWED, **DECIDING}[name], FLOATS, "processes", MOST.get(name))


def compare(does: Does, values: list[Any], kind: Any, most: int | None) -> None:
    plain, model = Timed(does), Timed(does)
    with ps.Pipeline(
        *(model, (X, values[0])),
        devices=["cpu", "cpu"],
        cuts=["last"],
        num_microbatches=2,
        workers=kind,
        replicas=1,
    ) as pipe:
        for k, t in enumerate([*values, values[0], 1000.5, *values[:3]]):
            if k == len(values) // 2:
                plain.temp = model.temp = 2.5
            loss = pipe.train_step(X, t, target=Y, loss_fn=F.mse_loss)
            expected = torch.zeros(())
            for x, y in zip(X.tensor_split(2), Y.tensor_split(2), strict=True):
                part = F.mse_loss(plain(x, t), y) / 2
                part.backward()
                expected += part.detach()
            assert torch.equal(loss, expected), t
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert torch.equal(p.grad, q.grad)
        if most is not None:
            assert len(pipe._runner.ways(True)) <= most


def test_several_numbers_in_several_places() -> None:
    model = Timed(lambda m, x, t, *more: x * t["a"] + more[0] - (more[1] if more[1] > 2 else 0))
    with ps.Pipeline(
        *(model, (X, {"a": 0.5}, 1.0, 2)), devices=["cpu", "cpu"], num_microbatches=2, replicas=1
    ) as pipe:
        for k in range(50):
            given = {"a": 0.5 + k * 0.1}, 1.0 - k * 0.2, 2 + k % 5
            found = pipe(X, *given)
            plain = torch.cat([model(x, *given) for x in X.tensor_split(2)])
            assert torch.equal(found, plain)
        assert len(pipe._runner.ways(True)) < 12


def test_zeros_and_what_is_no_number() -> None:
    model = Timed(lambda m, x, t: x / t if t == t else x)
    with ps.Pipeline(*(model, (X, 0.5)), devices=["cpu"], num_microbatches=2, replicas=1) as pipe:
        for t in (1.5, 0.0, -0.0, math.inf, math.nan, 2.5, math.nan, True, 3, False, None):
            if t is None:
                with pytest.raises(ps.InputError, match="TypeError"):
                    pipe(X, t)
                continue
            try:
                plain = torch.cat([model(x, t) for x in X.tensor_split(2)])
            except ZeroDivisionError:
                continue
            assert torch.equal(pipe(X, t).nan_to_num(), plain.nan_to_num())


def test_numbers_that_cannot_be_followed_are_refused_in_time() -> None:
    model = Timed(DECIDING["root"])
    with ps.Pipeline(*(model, (X, 0.5)), devices=["cpu"], num_microbatches=1, replicas=1) as pipe:
        for k in range(1, 65):
            pipe(X, float(k))
        with pytest.raises(ps.InputError, match=r"input 1 of the batch is a number.*64 times"):
            pipe(X, 65.0)
        assert torch.equal(pipe(X, 7.0), model(X, 7.0))
