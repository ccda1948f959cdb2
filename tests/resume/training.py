"""The training run: a small GPT-2 with dropout, AdamW, a scheduler, clipping, and checkpoints."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from tests.support.models import cases, uniform_plan

STEPS = 12
EVERY = 2  # steps between two checkpoints; every other is written in the background

Tell = Callable[[str], None]


def train(folder: Path, workers: str, stages: int, seed: int, tell: Tell) -> None:
    """Go on from the checkpoint in the folder, if there is one, to the end of the run.

    Args:
        folder: where checkpoints are.
        workers: their kind.
        stages: how many.
        seed: of what may differ from start to start.
        tell: tells the outside world what happens here.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    case = cases()["gpt2"]
    model = case.model()
    program = ps.capture(model, case.args, case.kwargs)
    plan = uniform_plan(program, stages, 3, random.Random(seed).choice(["gpipe", "1f1b"]))
    with ps.Pipeline(
        model, kwargs=case.kwargs, devices=["cpu"] * stages, workers=workers, plan=plan,
        program=program,
    ) as pipe:  # fmt: skip
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS + 1)
        things = {"optimizer": optimizer, "scheduler": scheduler}
        torch.manual_seed(2)
        found = ps.resume(folder / "run", pipe, **things)  # the first save may have been killed
        losses: list[float] = found["losses"] if found else []
        tell(f"from {len(losses)}")
        for step in range(len(losses), STEPS):
            tell("step")
            losses.append(one_step(pipe, optimizer, scheduler, case))
            if (step + 1) % EVERY == 0:
                tell("save")
                background = (step // EVERY + seed) % 2 == 0
                pipe.save(folder / "run", background=background, **things, losses=losses)
        found = {
            "losses": losses,
            "model": digests(pipe.state_dict()),
            "optimizer": [
                (number, digests(state))
                for number, state in sorted(optimizer.state_dict()["state"].items())
            ],
            "groups": optimizer.state_dict()["param_groups"],
            "scheduler": str(scheduler.state_dict()),
            "generator": digest(torch.get_rng_state()),
        }
    torch.save(found, folder / "end.part")
    (folder / "end.part").rename(folder / "end.pt")
    tell("done")


def one_step(pipe: ps.Pipeline, optimizer: Any, scheduler: Any, case: Any) -> float:
    """A step on a random batch."""
    tokens = torch.randint(64, case.kwargs["input_ids"].shape)
    optimizer.zero_grad()
    loss = pipe.train_step(input_ids=tokens, target=tokens.roll(-1, 1), loss_fn=case.loss_fn)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """Of every tensor."""
    return {name: digest(torch.as_tensor(value)) for name, value in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    """Of its bits."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.numpy())).hexdigest()


def fork(folder: Path, workers: str, stages: int, seed: int, wire: int) -> int:
    """Start the run in a process of its own, which writes to `wire`; returns its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()

        def tell(word: str) -> None:
            os.write(wire, f"{time.monotonic()} {word}\n".encode())

        train(folder, workers, stages, seed, tell)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)
