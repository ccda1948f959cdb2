"""What modules keep for themselves, and draw from, in training that goes back and forth."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.pool import pooled

pytestmark = pytest.mark.filterwarnings("ignore::penstock.RowsWarning")

_numbers = torch.Generator().manual_seed(5)
X = torch.randn(8, 6, generator=_numbers)
Y = torch.randn(8, 4, generator=_numbers)


class Net(nn.Module):
    """A module that keeps something, between layers that do not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.c = (
            nn.Linear(6, 8),
            inner,
            nn.Linear(8, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.inner(self.a(x).tanh())).tanh())


class FromPython(nn.Module):
    """Draws from a generator of Python's that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random(3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin() * self.numbers.random()


class FromNumpy(FromPython):
    """Draws from one of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)  # type: ignore[assignment]


class FromList(nn.Module):
    """Draws from one that is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = [np.random.RandomState(3)]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin() * float(self.numbers[0].rand())


class FromTorch(nn.Module):
    """Draws from one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: object) -> FromTorch:  # torch's generators cannot be copied
        return FromTorch()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin() * torch.rand(h.shape[1:], generator=self.numbers)


class CountsInDict(nn.Module):
    """Counts its calls in a dictionary, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"calls": 0}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return h.sin() / self.seen["calls"]


class CountsInList(nn.Module):
    """Counts its calls by what is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen.append(1.0)
        return h.sin() / len(self.seen)


KINDS = [FromPython, FromNumpy, FromList, FromTorch, CountsInDict, CountsInList]


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_keeps_is_as_on_one_device(
    kind: Callable[[], nn.Module], recompute: str
) -> None:
    torch.manual_seed(1)
    model = Net(kind())
    plain = copy.deepcopy(model)
    options = {"num_microbatches": 4, "schedule": "1f1b", "recompute": recompute, "cuts": ["b"]}
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, audit=None, **options, replicas=1) as pipe:  # type: ignore[arg-type]
        for _ in range(2):
            pipe.train_step(X, loss_fn=F.mse_loss, target=Y)
            for x, y in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
                (F.mse_loss(plain(x), y) * 0.25).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", [FromPython, FromNumpy, FromList])
def test_a_module_that_draws_from_its_own_generator_is_closed(
    kind: Callable[[], nn.Module],
) -> None:
    program = ps.capture(Net(kind()), (X,))
    assert "inner" in [call.target for call in program.train.calls]


def test_a_generator_that_worker_processes_draw_from_raises_no_alarm() -> None:
    torch.manual_seed(1)
    model, plain = Net(FromNumpy()), Net(FromNumpy())
    plain.load_state_dict(model.state_dict())
    options = {"num_microbatches": 4, "schedule": "1f1b", "cuts": ["b"], "workers": "processes"}
    with (
        pooled(),
        ps.Pipeline(model, (X,), devices=["cpu"] * 2, audit=1, **options, replicas=1) as pipe,
    ):  # type: ignore[arg-type]
        for _ in range(3):
            pipe.train_step(X, loss_fn=F.mse_loss, target=Y)
            for x, y in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
                (F.mse_loss(plain(x), y) * 0.25).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert "inner.numbers" in pipe.audit.why_not


def test_stages_do_not_share_a_generator() -> None:
    model = nn.Sequential(nn.Linear(6, 6), FromPython(), nn.Linear(6, 6), FromPython())
    model[3].numbers = model[1].numbers
    with pytest.raises(ps.InputError, match=r"'1' and '3' .* draw from the same Random"):
        ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, cuts=["2"], replicas=1)


class Recurrent(nn.Module):
    """An LSTM keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h[:, None].expand(-1, 3, -1))[0][:, -1]


def test_what_refers_to_parameters_stays_theirs_in_worker_processes() -> None:
    found = []
    for kind in ("threads", "processes"):
        torch.manual_seed(0)
        model = Net(Recurrent())
        options = {"devices": ["cpu"] * 2, "num_microbatches": 4, "cuts": ["b"], "audit": None}
        with pooled(), ps.Pipeline(model, (X,), workers=kind, **options, replicas=1) as pipe:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
