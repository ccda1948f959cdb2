"""The benchmark of GPUs, on CPUs: PyTorch's own ways train as the loop does."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch

from penstock.bench.contestants import RATE
from penstock.bench.gpus import MICROBATCHES, Case, Course
from penstock.bench.subjects import gpt2_like, language_loss, tokens

CPUS = [torch.device("cpu")] * 2


def case(dtype: torch.dtype | None) -> Case:
    return partial(gpt2_like, 2, 32, 2, 16), partial(tokens, 8, 16), language_loss, dtype


def last_loss(course: Course, steps: int, dtype: torch.dtype | None) -> float:
    """The loss of the last of so many steps of a loop."""
    build, data, loss_fn, _ = case(dtype)
    model, (x, y) = build(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with course.modes():
                loss = loss_fn(model(part), target) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_peers_train_as_the_loop_does(dtype: torch.dtype | None) -> None:
    course = Course(case(dtype), CPUS, steps=2)
    expected = last_loss(course, 4, dtype)
    found = {}
    for name, make in course.peers().items():
        with closing(make().start()) as peer:
            assert min(peer.step(2), peer.step(2)) > 0
            found[name] = peer.loss
    assert len(found) == 3
    assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-4)
