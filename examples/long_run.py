"""A long training run on two workers and on one device: are all losses the same bits?

    python examples/long_run.py [--steps 2000] [--workers threads] [--json FILE]
                                [--figure docs/images/long_run.png]

The demo's language model, smaller, with its dropout, on the demo's text. Two CPU workers train one
copy with `train_step`, `clip_grad_norm_`, AdamW and a scheduler; plain PyTorch trains another, step
by step beside them, with the model's own forward, one micro-batch after the other.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from train_gpt2 import Text, build_model, language_loss

import penstock as ps
from penstock.bench.record import machine
from penstock.comparison.compare import Comparison, VerifyReport, compare
from penstock.comparison.reference import one_device, run_with_threads
from penstock.display.figures import bare, canvas, require_matplotlib, save
from penstock.display.progress import Progress

BATCH, MICROBATCHES = 8, 4
RATE = 3e-3

Losses = dict[str, torch.Tensor | None]


class Trainer:
    """What makes steps of one of the two copies.

    Args:
        optimizer: of the copy.
        steps: of the whole run.
        clip: clips the copy's gradients.
    """

    def __init__(self, optimizer: Any, steps: int, clip: Callable[[float], Any]) -> None:
        self._optimizer = optimizer
        self._clip = clip
        self._scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)

    def step(self, gradients: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One step; returns the loss."""
        self._optimizer.zero_grad()
        loss = gradients()
        self._clip(1.0)
        self._optimizer.step()
        self._scheduler.step()
        return loss


def train(
    pipe: ps.Pipeline, alone: nn.Module, text: Text, steps: int
) -> tuple[Losses, Losses, Comparison]:
    """Both runs, step by step.

    Returns:
        the losses of the pipeline and of one device, by step, and how the weights compare.
    """
    program = ps.capture(copy.deepcopy(alone), (), {"input_ids": text.batch(BATCH)[0]})
    kind, options = torch.optim.AdamW, {"lr": RATE, "weight_decay": 0.01}
    ours = Trainer(pipe.optimizer(kind, **options), steps, pipe.clip_grad_norm_)
    parameters = list(alone.parameters())
    theirs = Trainer(
        kind(parameters, **options), steps, lambda n: nn.utils.clip_grad_norm_(parameters, n)
    )
    split: Losses = {}
    whole: Losses = {}
    with Progress(total=steps, unit="steps", console=Console(stderr=True)) as bar:
        for step in range(steps):
            tokens, target = text.batch(BATCH)
            split[str(step)] = loss = ours.step(
                lambda x=tokens, y=target: pipe.train_step(
                    input_ids=x, target=y, loss_fn=language_loss
                )
            )
            reference = one_device(alone, program, MICROBATCHES, (), {"input_ids": tokens})
            work = lambda r=reference, k=step, y=target: r.train_step(k, language_loss, y)  # noqa: E731
            whole[str(step)] = run_with_threads(
                lambda w=work: theirs.step(w), pipe.threads_per_worker
            )
            bar.advance(1, loss=loss.item())
    return split, whole, compare("weights at the end", pipe.state_dict(), alone.state_dict())


def draw(split: Sequence[float], whole: Sequence[float], title: str, path: Path) -> None:
    """Both curves, one on top of the other."""
    figure, axes = canvas(9, 4.2)
    axes.plot(split, color="#9ecae1", linewidth=3.0, label="two workers")
    axes.plot(whole, color="#1f3b57", linewidth=0.6, label="one device")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False)
    bare(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def main() -> int:
    """Train, compare and draw; 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", default="threads", choices=("threads", "processes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=Path("docs/images/long_run.png"))
    parser.add_argument("--json", type=Path, help="write losses and verdict to this file")
    options = parser.parse_args()
    require_matplotlib()
    torch.manual_seed(options.seed)
    text, model = Text(options.seed), build_model(width=64, layers=4, heads=4)
    alone = copy.deepcopy(model)
    with ps.Pipeline(
        model,
        kwargs={"input_ids": text.batch(BATCH)[0]},
        devices=["cpu", "cpu"],
        num_microbatches=MICROBATCHES,
        workers=options.workers,
    ) as pipe:
        print(pipe)
        split, whole, weights = train(pipe, alone, text, options.steps)
    report = VerifyReport(
        f"{options.steps} steps on two workers ({options.workers}) and on one device",
        (compare("losses", split, whole), weights),
    )
    print(report)
    curves = [[float(loss) for loss in run.values() if loss is not None] for run in (split, whole)]
    last = max(1, options.steps // 20)
    print(f"mean loss of the first {last} steps: {sum(curves[0][:last]) / last:.3f}")
    print(f"mean loss of the last {last} steps: {sum(curves[0][-last:]) / last:.3f}")
    verdict = "the same bits" if report.ok else "NOT the same bits"
    draw(*curves, f"{options.steps} steps on two workers and on one device: {verdict}",
         options.figure)  # fmt: skip
    print(f"drawn to {options.figure}")
    if options.json:
        found = {"machine": machine(), "ok": report.ok, "losses": curves}
        options.json.write_text(json.dumps(found))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
