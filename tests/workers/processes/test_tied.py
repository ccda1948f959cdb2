"""Tied weights in worker processes: named to the stages that read them, with the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import WorkerError
from tests.support.models import replicated, uniform_plan

pytestmark = pytest.mark.usefixtures("pool", "one_thread")

_MADE = torch.Generator().manual_seed(3)
X = torch.randint(0, 30, (8, 5), generator=_MADE)
Y = torch.randint(0, 30, (8, 5), generator=_MADE)


class Tied(nn.Module):
    """The last call reads the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(x)))
        return found


class Inode(nn.Module):
    """Says in which file the memory of a tensor is."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        address = weight.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, _, _, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in where.split("-"))
            if first <= address < last:
                return x.new_full((len(x),), int(inode), dtype=torch.int64)
        raise RuntimeError("nowhere")


class Told(Tied):
    """Returns where the last stage has the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inode = Inode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inode(self.layers(self.embedding(x)), self.embedding.weight)
        return found


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def pipeline(model: nn.Module, stages: int, replicas: int = 1, **options: Any) -> ps.Pipeline:
    program = ps.capture(model, (X,), **options)
    return ps.Pipeline(
        *(model, (X,)),
        program=program,
        plan=replicated(uniform_plan(program, stages, 4), replicas),
        workers="processes",
        threads_per_worker=1,
        progress=None,
        audit=None,
    )


@pytest.mark.parametrize("stages", [2, 3])
def test_the_last_stage_sees_the_memory_of_the_weight(stages: int) -> None:
    model = Told().eval()
    with pipeline(model, stages, keep_closed=["inode"]) as pipe, torch.no_grad():
        workers: Any = pipe._runner.workers
        segment = workers._shared.memories[id(model.embedding.weight)].segment
        assert pipe(X).tolist() == [os.fstat(segment.fd).st_ino] * len(X)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_the_bits_are_those_of_one_device(stages: int, replicas: int) -> None:
    plain, model = Tied(), Tied()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with pipeline(model, stages, replicas) as pipe:
        ours = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        for step in range(4):
            pipe.train_step(X, target=Y, loss_fn=loss_of)
            for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
                (loss_of(plain(x), y) / 4).backward()
            for each in (ours, optimizer):
                each.step()
                each.zero_grad()
            for weight in (plain.embedding.weight, model.embedding.weight):
                if step == 1:
                    weight.data.mul_(1.25)
                elif step == 2:
                    with torch.no_grad():
                        weight.add_(0.5)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        with torch.no_grad():
            assert torch.equal(pipe(X), torch.cat([plain(x) for x in X.chunk(4)]))


def test_a_change_between_forward_and_backward_is_an_error() -> None:
    model = Tied()
    with pipeline(model, 2) as pipe:
        output = pipe(X)
        with torch.no_grad():
            model.embedding.weight.add_(1.0)
        with pytest.raises(WorkerError, match="modified by an inplace operation"):
            output.sum().backward()


class Aliased(nn.Module):
    """The middle stage makes a value of the first weight without a copy; the last reads it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        weight = self.drop(self.first.weight)
        return F.linear(self.third(F.linear(x, weight)), weight)


def test_what_lies_where_a_weight_lies_is_copied_to_stages_that_do_not_map_it() -> None:
    model, x = Aliased().eval(), torch.randn(8, 4)
    program = ps.capture(model, (x,))
    cuts = [program.labels.index(name) for name in ("second", "third")]
    with (
        ps.Pipeline(
            *(model, (x,)),
            devices=3,
            workers="processes",
            num_microbatches=2,
            cuts=["second", "third"],
            progress=None,
            audit=None,
            threads_per_worker=1,
            replicas=1,
        ) as pipe,
        torch.no_grad(),
    ):
        assert list(pipe.plan.cuts) == cuts
        assert torch.equal(pipe(x), torch.cat([model(half) for half in x.chunk(2)]))
