"""Predicted and measured step times: how accurate plans are, and whether the choice is the best.

    python -m penstock.bench truth [--models resnet50,vit,gpt2,mlp] [--counts 2,4,8,16]
        [--schedules gpipe,1f1b,zero-bubble|all] [--turns 6] [--json FILE] [--record]

Every model is profiled, as it is for a user, and every schedule is planned for every number of
micro-batches by that profile. Each of these plans trains on two CPU workers in a process of its
own. (In one process the memory that a plan leaves behind slows down the next, by up to 20 % where
micro-batches are small.) What is measured is a `train_step` without the optimizer; the first steps,
in which memory settles, do not count.

A shared machine is 10 to 45 % faster in one minute than in the next. So a few plans at a time take
turns, and before each turn their micro-batches are profiled again: `error` compares what that
profile predicts with the steps of the same turn, in the median of the turns. `before` is the error
of the prediction that was made when the plan was. In the end the planner's own choice takes turns
with the fastest of the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.bench.peers.peer import PeerProcesses, Place
from penstock.bench.subjects import gpt2, resnet50
from penstock.capture import ROWS
from penstock.devices.allocator import keep_freed_memory
from penstock.display.progress import callback
from penstock.display.terminal import Progress
from penstock.loading import tolerate_missing_torchvision_operators
from penstock.plan.layout import Layout, Stretch
from penstock.plan.request import Request
from penstock.planning.planner import profiles_for
from penstock.planning.tuning import mean_square
from penstock.profile.data import DeviceProfile
from penstock.profile.measure import device_profile
from penstock.profile.team import Team
from penstock.schedule import SCHEDULES
from penstock.simulate import Simulator

COUNTS = (2, 4, 8, 16)
SCHEDULED = ("gpipe", "1f1b", "zero-bubble")
TURNS = 6
WARM_UPS = 5
SECONDS = 0.5  # of steps in a turn, at least
AT_ONCE = 4  # plans that take turns; each holds the memory of its step, up to 4 GB here
CLOSE = 0.07  # an error up to which a prediction is good
DEVICES = [torch.device("cpu")] * 2
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def pictures() -> Example:
    """ResNet-50, 32 images of 128x128."""
    return resnet50(), (torch.randn(32, 3, 128, 128),), {}


def vit() -> Example:
    """Eight blocks of a small vision transformer, 32 images of 128x128."""
    tolerate_missing_torchvision_operators()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=128, patch_size=16, num_layers=8, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    return model, (torch.randn(32, 3, 128, 128),), {}


def language() -> Example:
    """Six layers of GPT-2, half as wide, 32 rows of 128 tokens."""
    return gpt2(6, 384, 4096, 128), (), {"input_ids": torch.randint(4096, (32, 128))}


def mlp() -> Example:
    """Linear layers from 256 to 4096 wide, 256 rows."""
    widths = [512, 4096, 512, 2048, 2048, 256, 256, 256, 3072, 1024, 512]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(256, 512),), {}


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": pictures,
    "vit": vit,
    "gpt2": language,
    "mlp": mlp,
}


class Follower:
    """Trains by a plan, in a process of its own, some steps at a time."""

    def __init__(self, name: str, plan: ps.Plan, _: Place) -> None:
        model, self._args, self._kwargs = MODELS[name]()
        self._pipe = ps.Pipeline(
            model.train(), self._args, self._kwargs, devices=DEVICES, plan=plan, audit=None
        )
        self._fewest = WARM_UPS

    def steps(self) -> list[float]:
        """Train for half a second at least; returns the seconds of every step."""
        taken: list[float] = []
        while sum(taken) < SECONDS or len(taken) < self._fewest:
            self._pipe.zero_grad()
            start = time.perf_counter()
            self._pipe.train_step(*self._args, loss_fn=mean_square, **self._kwargs)
            taken.append(time.perf_counter() - start)
        self._fewest = 0
        return taken

    def close(self) -> None:
        """Close the pipeline, which ends its workers."""
        self._pipe.close()


def trainer(name: str, plan: ps.Plan) -> PeerProcesses:
    """A process that follows a plan; its command is `steps`.

    Args:
        name: one of `MODELS`.
        plan: for it.
    """
    what = f"the trainer of {plan.schedule}, m={plan.num_microbatches}"
    return PeerProcesses(what, [partial(Follower, name, plan)])


class Turn(NamedTuple):
    """What a plan was predicted to take by a new profile, and the steps that it then took."""

    predicted: float
    steps: list[float]

    @property
    def error(self) -> float:
        """The relative error of the prediction, positive if it was too long."""
        return self.predicted / statistics.median(self.steps) - 1


class Planned:
    """A model, its profile, and its plans.

    Args:
        name: one of `MODELS`.
        progress: called as the measurement goes on.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        self.name = name
        self.progress = progress
        model, args, kwargs = MODELS[name]()
        self.program = ps.capture(model.train(), args, kwargs)
        self.leaves = self.program.flatten_inputs(args, kwargs)
        self.team = Team(self.program, DEVICES[0], len(DEVICES), threads=1)
        (self.costs,) = profiles_for(
            self.program,
            args,
            kwargs,
            choices=[DEVICES],
            request=Request(),
            fresh=True,
            progress=progress,
        )

    def result(self, counts: Sequence[int], schedules: Sequence[str], turns: int) -> dict[str, Any]:
        """All plans, as predicted and as measured; the planner's choice beside the fastest."""
        chosen = ps.plan(self.costs, replicas=1)
        plans = [
            ps.plan(self.costs, num_microbatches=count, schedule=schedule, replicas=1)
            for count in counts
            for schedule in schedules
        ]
        groups = [plans[k : k + AT_ONCE] for k in range(0, len(plans), AT_ONCE)]
        rows = [row for group in groups for row in self._rows(group, turns)]
        order = sorted(range(len(plans)), key=lambda k: float(rows[k]["measured_seconds"]))
        fastest = [plans[k] for k in order if not is_same(plans[k], chosen)]
        last = self._rows([chosen, *fastest[: AT_ONCE - 1]], turns)
        best = min(row["measured_seconds"] for row in last)
        return {
            "model": self.name,
            "confidence": str(self.costs.confidence),
            "plans": rows,
            "chosen": last[0],
            "fastest": last[1:],
            "chosen_over_best": last[0]["measured_seconds"] / best - 1,
        }

    def _rows(self, plans: Sequence[ps.Plan], turns: int) -> list[dict[str, Any]]:
        """The rows of plans that take turns; before each turn their micro-batches are profiled."""
        found: list[list[Turn]] = [[] for _ in plans]
        counts = sorted({plan.num_microbatches for plan in plans})
        with ExitStack() as stack:
            trainers = []
            for plan in plans:
                what = f"{plan.schedule}, m={plan.num_microbatches}"
                self.progress(0, turns, f"{self.name}: {what}")
                trainers.append(trainer(self.name, plan))
                stack.callback(trainers[-1].close)
                trainers[-1].call("steps")  # memory settles
            for turn in range(turns):
                self.progress(turn, turns, f"{self.name}: turns of {len(plans)} plans")
                costs = {count: self._profiled(count) for count in counts}
                for plan, process, own in zip(plans, trainers, found, strict=True):
                    now = costs[plan.num_microbatches]
                    own.append(Turn(predicted(plan, now), *process.call("steps")))
        return [_row(plan, own) for plan, own in zip(plans, found, strict=True)]

    def _profiled(self, count: int) -> ps.Profile:
        """A new profile, of this number of micro-batches alone.

        Halving backwards is taken to cost the same share of the work as in the first profile.
        """
        given = self.program.varying.sizes(self.leaves)
        sizes = {**given, ROWS: given[ROWS] // count}
        passes = self.team.measure(self.program.varying.resized(self.leaves, sizes), sizes)
        before = self.costs.on("cpu")
        more = before.halving_seconds(sizes[ROWS]).sum() / _work(before, sizes[ROWS])
        found = device_profile("cpu", {sizes[ROWS]: passes}, [0.0])
        halving = (more * _work(found, sizes[ROWS]),)
        kinds = {"cpu": msgspec.structs.replace(found, halving=halving)}
        return msgspec.structs.replace(self.costs, kinds=kinds)


def predicted(plan: ps.Plan, costs: ps.Profile) -> float:
    """The seconds of a step by this plan, if calls cost what this profile says."""
    stretches = [Stretch(s.worker, *s.calls, s.recompute) for s in plan.stages]
    schedule = plan.schedule_for(plan.num_microbatches)
    return Layout(costs, plan.num_microbatches).simulated(Simulator(schedule), stretches)


def is_same(one: ps.Plan, other: ps.Plan) -> bool:
    """Whether two plans run the same, whatever else was considered."""
    a, b = ((p.num_microbatches, p.schedule, p.rules, p.stages) for p in (one, other))
    return a == b


def _work(kind: DeviceProfile, rows: int) -> float:
    """The seconds of all forwards and backwards of a micro-batch of this many rows."""
    return float(sum(map(sum, kind.seconds(rows))))


def _row(plan: ps.Plan, turns: Sequence[Turn]) -> dict[str, Any]:
    measured = statistics.median(step for turn in turns for step in turn.steps)
    return {
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "cuts": list(plan.cuts),
        "predicted_seconds": statistics.median(turn.predicted for turn in turns),
        "measured_seconds": measured,
        "error": statistics.median(turn.error for turn in turns),
        "before_seconds": plan.predicted_step_seconds,
        "before": plan.predicted_step_seconds / measured - 1,
        "turns": [turn._asdict() for turn in turns],
    }


def _show(result: dict[str, Any]) -> None:
    print(f"{result['model']}; profile: {result['confidence']}")
    print(
        f"  {'schedule':16} {'m':>3} {'predicted':>10} {'measured':>10} "
        f"{'turns':>16} {'error':>7} {'before':>7}"
    )
    for row in (*result["plans"], *result["fastest"], result["chosen"]):
        medians = [statistics.median(turn["steps"]) for turn in row["turns"]]
        print(
            f"  {row['schedule']:16} {row['num_microbatches']:3d} "
            f"{1e3 * row['predicted_seconds']:7.0f} ms {1e3 * row['measured_seconds']:7.0f} ms "
            f"{1e3 * min(medians):5.0f} to {1e3 * max(medians):5.0f} ms "
            f"{row['error']:+7.1%} {row['before']:+7.1%}"
        )
    print(
        f"  these {1 + len(result['fastest'])} took turns: the fastest and, last, the choice, "
        f"{result['chosen_over_best']:+.1%} over the best of them"
    )


def _distribution(what: str, errors: Sequence[float]) -> None:
    sizes = sorted(map(abs, errors))
    close = sum(size <= CLOSE for size in sizes) / len(sizes)
    print(
        f"{what}: {len(sizes)} errors, median {statistics.median(sizes):.1%}, "
        f"largest {sizes[-1]:.1%}, {close:.0%} within {CLOSE:.0%}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("truth", __doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--schedules", default=",".join(SCHEDULED), help="names, or all")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "models", "counts", "schedules")
    keep_freed_memory()  # as pipelines do
    counts = [int(count) for count in options.counts.split(",")]
    schedules = list(SCHEDULES) if options.schedules == "all" else options.schedules.split(",")
    results = []
    for name in options.models.split(","):
        with callback(name) as progress:
            results.append(Planned(name, progress).result(counts, schedules, options.turns))
        _show(results[-1])
        record.save("truth", {"results": results}, options)
    rows = [row for result in results for row in result["plans"]]
    _distribution("profiled in the same turn", [row["error"] for row in rows])
    _distribution("profiled before", [row["before"] for row in rows])
    return 0
