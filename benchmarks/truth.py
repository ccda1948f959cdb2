"""Predicted against measured: does the planner tell the truth, and does it choose the best?

    python -m benchmarks.truth [--models resnet50,vit,gpt2,mlp] [--rounds 1] [--json FILE]

Every model is profiled once. Then every schedule is planned for every number of micro-batches, and
each of these plans and the planner's own choice trains in a process of its own, as it would for a
user, on two CPU workers. (In one process the memory that a plan leaves behind slows down the next,
by up to 20 % where micro-batches are small.) What is compared is the time of a `train_step` without
the optimizer; the loss is a mean of squares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench.measure import machine
from penstock.loading import load_model, tolerate_missing_torchvision_operators
from penstock.observe.progress import callback
from penstock.plan.request import Request
from penstock.planning import profile_for
from penstock.profile.measure import Progress
from penstock.tuning import mean_square

COUNTS = (2, 4, 8, 16)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
WARM_UPS, STEPS = 2, 4
DEVICES = [torch.device("cpu")] * 2
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def resnet50() -> Example:
    """32 images of 128x128."""
    return load_model("torchvision.models:resnet50"), (torch.randn(32, 3, 128, 128),), {}


def vit() -> Example:
    """Eight blocks of a small vision transformer, 32 images of 128x128."""
    tolerate_missing_torchvision_operators()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=128, patch_size=16, num_layers=8, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    return model, (torch.randn(32, 3, 128, 128),), {}


def gpt2() -> Example:
    """Six layers of GPT-2, half as wide, 32 rows of 128 tokens."""
    tolerate_missing_torchvision_operators()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=4096, n_positions=128)
    config.use_cache, config.bos_token_id, config.eos_token_id = False, 0, 0
    return GPT2LMHeadModel(config), (), {"input_ids": torch.randint(4096, (32, 128))}


def mlp() -> Example:
    """Linear layers from 256 to 4096 wide, 256 rows."""
    widths = [512, 4096, 512, 2048, 2048, 256, 256, 256, 3072, 1024, 512]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(256, 512),), {}


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": resnet50,
    "vit": vit,
    "gpt2": gpt2,
    "mlp": mlp,
}


def compared(name: str, counts: Sequence[int], rounds: int, progress: Progress) -> dict[str, Any]:
    """All plans of one model, as predicted and as measured."""
    model, args, kwargs = MODELS[name]()
    program = ps.capture(model.train(), args, kwargs)
    costs = profile_for(
        program, args, kwargs, devices=DEVICES, request=Request(), fresh=True, progress=progress
    )
    plans = [
        ps.plan(costs, num_microbatches=count, schedule=schedule)
        for count in counts
        for schedule in SCHEDULES
    ]
    plans.append(ps.plan(costs))
    steps = _in_processes_of_their_own(name, plans, rounds, progress)
    rows = [_row(plan, seconds) for plan, seconds in zip(plans, steps, strict=True)]
    best = min(row["measured_seconds"] for row in rows)
    return {
        "model": name,
        "confidence": str(costs.confidence),
        "plans": rows[:-1],
        "chosen": rows[-1],
        "chosen_over_best": rows[-1]["measured_seconds"] / best - 1,
    }


def _in_processes_of_their_own(
    name: str, plans: Sequence[ps.Plan], rounds: int, progress: Progress
) -> list[list[float]]:
    """The seconds of some steps of every plan."""
    taken: list[list[float]] = [[] for _ in plans]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        for turn in range(rounds):
            for number, plan in enumerate(plans):
                done, total = turn * len(plans) + number, rounds * len(plans)
                progress(done, total, f"{name}: {plan.schedule}, m={plan.num_microbatches}")
                plan.save(path)
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.truth"]
                command += ["--models", name, "--train", str(path)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                taken[number] += json.loads(output)
    return taken


def _train(name: str, path: str) -> None:
    """Follow a plan for some steps, and print their seconds."""
    model, args, kwargs = MODELS[name]()
    taken = []
    with ps.Pipeline(model.train(), args, kwargs, devices=DEVICES, plan=path) as pipe:
        for _ in range(WARM_UPS + STEPS):
            pipe.zero_grad()
            start = time.perf_counter()
            pipe.train_step(*args, loss_fn=mean_square, **kwargs)
            taken.append(time.perf_counter() - start)
    print(json.dumps(taken[WARM_UPS:]))


def _row(plan: ps.Plan, seconds: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "cuts": list(plan.cuts),
        "predicted_seconds": plan.predicted_step_seconds,
        "bound_seconds": plan.bound_seconds,
        "measured_seconds": median,
        "error": plan.predicted_step_seconds / median - 1,
        "seconds": list(seconds),
    }


def _show(result: dict[str, Any]) -> None:
    print(f"{result['model']}; profile: {result['confidence']}")
    print(
        f"  {'schedule':16} {'m':>3} {'predicted':>10} {'measured':>10} {'spread':>16} {'error':>7}"
    )
    for row in (*result["plans"], result["chosen"]):
        low, high = min(row["seconds"]), max(row["seconds"])
        print(
            f"  {row['schedule']:16} {row['num_microbatches']:3d} "
            f"{1e3 * row['predicted_seconds']:7.0f} ms {1e3 * row['measured_seconds']:7.0f} ms "
            f"{1e3 * low:5.0f} to {1e3 * high:5.0f} ms {row['error']:+7.1%}"
        )
    print(f"  the last is the planner's choice: {result['chosen_over_best']:+.1%} over the best")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--train", metavar="PLAN", help="only follow this plan; prints seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.train:
        _train(options.models, options.train)
        return 0
    counts = [int(count) for count in options.counts.split(",")]
    results = []
    for name in options.models.split(","):
        with callback(name) as progress:
            results.append(compared(name, counts, options.rounds, progress))
        _show(results[-1])
    errors = sorted(abs(row["error"]) for result in results for row in result["plans"])
    within = sum(error <= 0.07 for error in errors) / len(errors)
    print(
        f"error of {len(errors)} predictions: median {statistics.median(errors):.1%}, "
        f"largest {errors[-1]:.1%}, {within:.0%} within 7 %"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"results": results, "machine": machine()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
