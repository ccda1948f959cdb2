"""Predicted against measured: does the planner tell the truth, and does it choose the best?

    python -m benchmarks.truth [--models resnet50,vit,gpt2,mlp] [--counts 2,4,8,16]
        [--schedules gpipe,1f1b,zero-bubble|all] [--rounds 3] [--json FILE]

Every schedule is planned for every number of micro-batches, by the profile of the first round. In
every round each model is profiled anew, all plans are predicted by that profile, and each of them
and the planner's own choice trains in a process of its own, as it would for a user, on two CPU
workers. (In one process the memory that a plan leaves behind slows down the next, by up to 20 %
where micro-batches are small.) The first steps, in which memory settles, do not count. A machine
does not run equally fast at all times: the medians of all rounds are compared, and single rounds
beside them. What is measured is a `train_step` without the optimizer; the loss is a mean of
squares.
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
from penstock.engine.allocator import keep_freed_memory
from penstock.loading import load_model, tolerate_missing_torchvision_operators
from penstock.observe.progress import callback
from penstock.plan.layout import Layout, Stretch
from penstock.plan.request import Request
from penstock.planning import profile_for
from penstock.profile.measure import Progress
from penstock.schedule import SCHEDULES
from penstock.tuning import mean_square

COUNTS = (2, 4, 8, 16)
SCHEDULED = ("gpipe", "1f1b", "zero-bubble")
ROUNDS = 3
WARM_UPS, FEWEST_STEPS = 5, 6
SECONDS = 3.0  # of steps that count, at least
CLOSE = 0.07  # an error up to which a prediction is good
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


class Subject:
    """A model whose plans are predicted and measured, round by round.

    Args:
        name: one of `MODELS`.
        counts: the numbers of micro-batches to plan for.
        schedules: the schedules to plan, each with every count.
    """

    def __init__(self, name: str, counts: Sequence[int], schedules: Sequence[str]) -> None:
        self.name = name
        self.asked = [(count, schedule) for count in counts for schedule in schedules]
        self.plans: list[ps.Plan] = []
        self.confidence: list[str] = []
        self.predicted: list[list[float]] = []
        self.measured: list[list[list[float]]] = []

    def round(self, progress: Progress) -> None:
        """Profile, predict every plan, and train with each."""
        costs = self._profiled(progress)
        if not self.plans:
            self.plans = [
                ps.plan(costs, num_microbatches=count, schedule=schedule)
                for count, schedule in self.asked
            ]
            self.plans.append(ps.plan(costs))
        self.confidence.append(str(costs.confidence))
        self.predicted.append([predicted(plan, costs) for plan in self.plans])
        steps = []
        for number, plan in enumerate(self.plans):
            about = f"{self.name}: {plan.schedule}, m={plan.num_microbatches}"
            progress(number, len(self.plans), about)
            steps.append(_in_a_process_of_its_own(self.name, plan))
        self.measured.append(steps)

    def _profiled(self, progress: Progress) -> ps.Profile:
        model, args, kwargs = MODELS[self.name]()
        program = ps.capture(model.train(), args, kwargs)
        return profile_for(
            program, args, kwargs, devices=DEVICES, request=Request(), fresh=True, progress=progress
        )

    def result(self) -> dict[str, Any]:
        """All plans, as predicted and as measured until now; the planner's choice at the end."""
        rows = [
            _row(plan, foretold, seconds)
            for plan, foretold, seconds in zip(
                self.plans,
                zip(*self.predicted, strict=True),
                zip(*self.measured, strict=True),
                strict=True,
            )
        ]
        best = min(row["measured_seconds"] for row in rows)
        return {
            "model": self.name,
            "confidence": self.confidence,
            "plans": rows[:-1],
            "chosen": rows[-1],
            "chosen_over_best": rows[-1]["measured_seconds"] / best - 1,
        }


def predicted(plan: ps.Plan, costs: ps.Profile) -> float:
    """The seconds of a step by this plan, if calls cost what this profile says."""
    stretches = [Stretch(s.worker, *s.calls, s.recompute) for s in plan.stages]
    schedule = plan.schedule_for(plan.num_microbatches)
    return Layout(costs, plan.num_microbatches).simulated(schedule, stretches).seconds


def _in_a_process_of_its_own(name: str, plan: ps.Plan) -> list[float]:
    """The seconds of some steps."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        plan.save(path)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.truth"]
        command += ["--models", name, "--train", str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    steps: list[float] = json.loads(done.stdout)
    return steps


def _train(name: str, path: str) -> None:
    """Follow a plan for some steps, and print their seconds."""
    model, args, kwargs = MODELS[name]()
    taken: list[float] = []
    with ps.Pipeline(model.train(), args, kwargs, devices=DEVICES, plan=path) as pipe:
        for _ in range(WARM_UPS):
            pipe.zero_grad()
            pipe.train_step(*args, loss_fn=mean_square, **kwargs)
        while len(taken) < FEWEST_STEPS or sum(taken) < SECONDS:
            pipe.zero_grad()
            start = time.perf_counter()
            pipe.train_step(*args, loss_fn=mean_square, **kwargs)
            taken.append(time.perf_counter() - start)
    print(json.dumps(taken))


def _row(
    plan: ps.Plan, foretold: Sequence[float], rounds: Sequence[Sequence[float]]
) -> dict[str, Any]:
    measured = statistics.median(step for steps in rounds for step in steps)
    expected = statistics.median(foretold)
    alone = [p / statistics.median(steps) - 1 for p, steps in zip(foretold, rounds, strict=True)]
    return {
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "cuts": list(plan.cuts),
        "predicted_seconds": expected,
        "measured_seconds": measured,
        "error": expected / measured - 1,
        "errors_of_rounds": alone,
        "predicted_in_rounds": list(foretold),
        "measured_in_rounds": [list(steps) for steps in rounds],
    }


def _show(result: dict[str, Any]) -> None:
    print(f"{result['model']}; profiles: {'; '.join(result['confidence'])}")
    print(
        f"  {'schedule':16} {'m':>3} {'predicted':>10} {'measured':>10} "
        f"{'rounds':>16} {'error':>7}  of single rounds"
    )
    for row in (*result["plans"], result["chosen"]):
        medians = [statistics.median(steps) for steps in row["measured_in_rounds"]]
        alone = " ".join(f"{error:+.1%}" for error in row["errors_of_rounds"])
        print(
            f"  {row['schedule']:16} {row['num_microbatches']:3d} "
            f"{1e3 * row['predicted_seconds']:7.0f} ms {1e3 * row['measured_seconds']:7.0f} ms "
            f"{1e3 * min(medians):5.0f} to {1e3 * max(medians):5.0f} ms {row['error']:+7.1%}"
            f"  {alone}"
        )
    print(f"  the last is the planner's choice: {result['chosen_over_best']:+.1%} over the best")


def _distribution(what: str, errors: Sequence[float]) -> None:
    sizes = sorted(map(abs, errors))
    close = sum(size <= CLOSE for size in sizes) / len(sizes)
    print(
        f"{what}: {len(sizes)} errors, median {statistics.median(sizes):.1%}, "
        f"largest {sizes[-1]:.1%}, {close:.0%} within {CLOSE:.0%}"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--schedules", default=",".join(SCHEDULED), help="or all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--train", metavar="PLAN", help="only follow this plan; prints seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.train:
        _train(options.models, options.train)
        return 0
    keep_freed_memory()  # as pipelines do
    counts = [int(count) for count in options.counts.split(",")]
    schedules = list(SCHEDULES) if options.schedules == "all" else options.schedules.split(",")
    subjects = [Subject(name, counts, schedules) for name in options.models.split(",")]
    results: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for subject in subjects:
            with callback(f"round {turn + 1}") as progress:
                subject.round(progress)
        results = [subject.result() for subject in subjects]
        if options.json:
            found = {"results": results, "rounds": turn + 1, "machine": machine()}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    for result in results:
        _show(result)
    rows = [row for result in results for row in result["plans"]]
    _distribution("medians of all rounds", [row["error"] for row in rows])
    _distribution("single rounds", [error for row in rows for error in row["errors_of_rounds"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
