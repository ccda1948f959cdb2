"""The training script: it goes on from its newest checkpoint, whoever runs it, and however many.

It appends what it does to `FOLDER/log`, and leaves the last weights in `FOLDER/end.pt`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import penstock as ps
from tests.elastic.training import MICROBATCHES, RATE, STEPS, TASKS, Data

RANK = os.environ.get("RANK", "0")
WORLD = os.environ.get("WORLD_SIZE", "1")


def note(folder: Path, what: str) -> None:
    """Append a line to the log: when, which rank of how many, its process, and what it does."""
    line = f"{time.time():.3f} {RANK} {WORLD} {os.getpid()} {what}\n"
    descriptor = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def train(
    folder: Path, model_name: str, steps: int, every: int, pause: float, **options: Any
) -> None:
    """Train what is left to train.

    Args:
        folder: where everything is.
        model_name: one of `TASKS`.
        steps: of the whole run.
        every: steps between two saves.
        pause: seconds that loading a batch takes.
        **options: of the pipeline.
    """
    task = TASKS[model_name]
    model = task.model()
    batches = ps.Batches(DataLoader(Data(task, steps), batch_size=None))
    example = (task.batch(0)[0],)
    with ps.Pipeline(
        model, example, num_microbatches=MICROBATCHES, threads_per_worker=1, **options
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=RATE)
        things: dict[str, Any] = {"optimizer": optimizer, "batches": batches}
        ps.resume(folder / "run", pipe, **things)
        pipe.autosave(folder / "run", every=every, **things)
        note(folder, f"from {batches.batch}")
        for _ in batches.epochs(1):
            for x, target in batches:
                time.sleep(pause)
                note(folder, f"step {batches.batch - 1}")
                pipe.train_step(x, target=target, loss_fn=task.loss)
                optimizer.step()
                optimizer.zero_grad()
        state = pipe.state_dict()
        note(folder, "end")
        if pipe._workers.role.leads:
            torch.save(state, folder / "end.part")
            (folder / "end.part").rename(folder / "end.pt")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=TASKS, default="gpt")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before every step")
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--devices", type=int, help="CPU workers, where they are not ranks")
    given = parser.parse_args()
    note(given.folder, "start")
    devices = ["cpu"] * given.devices if given.devices else None
    train(
        *(given.folder, given.model, given.steps, given.every, given.pause),
        workers=given.workers,
        devices=devices,
    )


if __name__ == "__main__":
    main()
