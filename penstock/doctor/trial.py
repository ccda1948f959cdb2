"""Trains a tiny model on workers of one kind. Run as a process: prints findings as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Literal, cast

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.doctor.findings import Finding
from penstock.errors import PenstockError

KINDS: tuple[Literal["threads", "processes"], ...] = ("threads", "processes")


def trial(kind: Literal["threads", "processes"]) -> Iterator[Finding]:
    """Whether workers start, train, and compute the bits of plain PyTorch.

    Args:
        kind: of the workers.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    torch.set_num_threads(1)
    parts = list(zip(x.split(3), y.split(3), strict=True))
    for rows, target in parts:
        (F.mse_loss(model(rows), target) / len(parts)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    start = time.monotonic()
    try:
        with ps.Pipeline(
            model,
            (x,),
            devices=["cpu", "cpu"],
            workers=kind,
            replicas=1,
            num_microbatches=2,
            threads_per_worker=1,
            progress=None,
        ) as pipe:
            pipe.train_step(x, target=y, loss_fn=F.mse_loss)
    except (PenstockError, OSError) as error:
        to_do = "see the findings above" if kind == "threads" else 'use workers="threads" meanwhile'
        yield Finding(f"workers: {kind}", "problem", f"{type(error).__name__}: {error}", to_do)
        return
    seconds = time.monotonic() - start
    found = [parameter.grad for parameter in model.parameters()]
    is_same = all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(expected, found, strict=True)
    )
    yield Finding(
        f"workers: {kind}",
        "ok" if is_same else "problem",
        f"two trained a tiny model within {seconds:.1f} s, with "
        f"{'the bits of plain PyTorch' if is_same else 'other bits than plain PyTorch'}",
        "" if is_same else "please report this, with the output of penstock doctor --json",
    )


if __name__ == "__main__":
    chosen = cast(Literal["threads", "processes"], sys.argv[1])
    print(msgspec.json.encode(list(trial(chosen))).decode())
