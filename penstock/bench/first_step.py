"""A training script up to its second step, and the seconds of each part; `starting` runs it.

    python -m penstock.bench.first_step MODEL [threads|processes]

Without a kind of workers, it is plain PyTorch with all cores. Prints the seconds of the parts as
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.workers.backend import WorkerKind


def train(model_name: str, workers: WorkerKind | None) -> dict[str, float]:
    """Run the script; returns the seconds of its parts by name, in order.

    Args:
        model_name: the name of a model in `subjects`.
        workers: the kind of workers; `None` for plain PyTorch.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with part("torch"):
        import torch
    with part("model"):
        from penstock.bench.subjects import subjects

        subject = subjects(quick=False)[model_name]
        model, (x, y) = subject.build().train(), subject.data()
    optimizer: Any
    if not workers:
        with part("optimizer"):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            subject.loss(model(x), y).backward()
            optimizer.step()
    else:
        with part("penstock"):
            from penstock.pipeline import Pipeline
        with part("pipeline"):
            pipe = Pipeline(model, (x,), workers=workers)
        with part("optimizer"):
            optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            pipe.train_step(x, target=y, loss_fn=subject.loss)
            optimizer.step()

    for name in ("first step", "second step"):
        with part(name):
            step()
    if workers:
        pipe.close()
    return seconds


if __name__ == "__main__":
    kinds: dict[str, WorkerKind | None] = {
        "": None,
        "threads": "threads",
        "processes": "processes",
    }
    print(json.dumps(train(sys.argv[1], kinds[" ".join(sys.argv[2:])])))
