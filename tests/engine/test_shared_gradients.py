"""Gradients that share memory with what autograd adds to later.

In `x + p.unsqueeze(0)`, with one row, `p.grad` becomes a view of the gradient of `x`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.span import apart
from tests.interleavings.cases import Case
from tests.interleavings.running import one_core, plan_of

ROWS, LENGTH, WIDTH = 4, 5, 6


class Positions(nn.Module):
    """Adds a learned table to what comes, and to what a linear layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x + self.table.unsqueeze(0))
        x = torch.tanh(self.hidden(x) + self.other.unsqueeze(0))
        return self.last(x)


class Late(nn.Module):
    """Ends with the sum of a linear layer and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(self.hidden(F.tanh(self.first(x))) + self.table.unsqueeze(0))


def built() -> tuple[Positions, Tensor]:
    torch.manual_seed(0)
    return Positions(), torch.randn(ROWS, LENGTH, WIDTH)


def looped(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of one row after the other, also those of the rows."""
    found = {}
    for k, row in enumerate(x.split(1)):
        row = row.detach().requires_grad_()  # where it is: bits depend on alignment
        model(row).square().sum().backward()
        assert row.grad is not None
        found[f"row {k}"] = row.grad.clone()  # autograd adds to it in place, too
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ["cpu"]},
        {"devices": ["cpu"], "workers": "processes"},
        {"devices": ["cpu", "cpu"], "schedule": "1f1b", "replicas": 1},
        {"devices": ["cpu", "cpu"], "schedule": "zero-bubble", "replicas": 1},
        {"devices": ["cpu", "cpu"], "schedule": "gpipe", "replicas": 1, "recompute": "all"},
        {"devices": ["cpu", "cpu"], "replicas": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_bits_are_those_of_one_device(options: dict[str, Any]) -> None:
    """Of the gradients of the batch, too, which are there while later ones are added up."""
    model, x = built()
    with one_core():
        wanted = looped(copy.deepcopy(model), x)
        x.requires_grad_()
        with ps.Pipeline(
            *(model, (x,)),
            num_microbatches=ROWS,
            threads_per_worker=1,
            audit=None,
            progress=None,
            **options,
        ) as pipe:
            for _ in range(5):  # stages are threads, which may be in time
                x.grad = None
                model.zero_grad()
                pipe(x).square().sum().backward()
                assert x.grad is not None
                found = {f"row {k}": row for k, row in enumerate(x.grad.split(1))}
                found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                assert equal(found, wanted) == []


def test_a_gradient_that_waits_for_its_weight_half_stays_what_it_is() -> None:
    """The last of three stages has its weight halves after other backwards."""
    torch.manual_seed(0)
    late = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Late())
    x, devices = torch.randn(ROWS, LENGTH, WIDTH), ("cpu", "cpu", "cpu")
    program = ps.capture(late, (x,))
    case = Case(lambda: late, (1, 2), devices=devices, schedule="zero-bubble")
    with one_core():
        wanted = looped(copy.deepcopy(late), x)
        with ps.Pipeline(
            *(late, (x,)),
            devices=devices,
            program=program,
            plan=plan_of(case, program, ROWS),
            threads_per_worker=1,
            audit=None,
            progress=None,
        ) as pipe:
            for _ in range(2):  # in the first one, halves are tried
                late.zero_grad()
                pipe.train_step(x, target=x, loss_fn=lambda y, _: y.square().sum(), weight=None)
        for name, parameter in late.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, wanted[name]), name


def test_only_what_others_have_is_copied() -> None:
    alone, whole, two = torch.ones(4), torch.arange(6.0), torch.arange(6.0)
    pair, base = two.tensor_split(2), torch.zeros(2, 3)
    view, kept = base.t(), base.view(6)
    given = [alone, None, whole.view(2, 3), *pair, view, torch.eye(2).to_sparse()]
    del whole, two, pair, base
    found = apart(given)
    assert [one is other for one, other in zip(found, given, strict=True)] == [
        *(True, True, True, True, True, False, True)
    ]
    assert found[5] is not None
    assert found[5].stride() == view.stride()
    kept.fill_(7)
    assert found[5].eq(0).all()
