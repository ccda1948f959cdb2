"""What capturing takes in memory, beside plain PyTorch, and what pipelines leave behind."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import graph_module

import penstock as ps
from penstock.bench.capture_time import UNET, held


@pytest.mark.parametrize("frozen", [False, True])
def test_capturing_takes_little_more_than_a_step(frozen: bool) -> None:
    step, capture = (held(UNET, way, frozen)["resident"] for way in ("step", "capture"))
    print(f"{capture / step:.2f}: {capture / 1e6:.0f} MB, and {step / 1e6:.0f} MB for a step")
    assert step > 50e6
    assert capture < 1.3 * step


def test_nothing_stays_of_the_source_of_stages() -> None:
    def sources() -> set[str]:
        gc.collect()
        return set(graph_module._loader.eval_cache)

    before, meanwhile = sources(), set[str]()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(4, 4)
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, replicas=1, progress=None) as pipe:
        for rows in (4, 6):
            pipe.train_step(x[:1].expand(rows, 4), target=torch.ones(rows, 2), loss_fn=F.mse_loss)
        meanwhile = sources() - before
    del pipe
    assert meanwhile
    assert sources() <= before
